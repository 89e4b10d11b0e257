"""Checkpoints of GPTQ and AWQ: packed here as their formats say, and read as the weights that were packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, plan, section
from torch import Tensor

from halftune.config.facts.model import read_model_facts
from halftune.core.errors import ModelError
from halftune.model.load.load import load_model
from halftune.precision.report import check_dtypes

GROUP = 16
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that stands in each place of an int32


def packed(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Integers ``[N, K]``, packed along the second dimension."""
    count = 32 // bits
    groups = values.to(torch.int64).view(len(values), -1, count)
    total = sum(groups[:, :, one] << (bits * place) for place, one in enumerate(order or range(count)))
    assert torch.is_tensor(total)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def quantised(folder: Path, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Replaces a checkpoint's linear layers by packed ones; returns all weights as they are then."""
    bits, awq = settings["bits"], settings["quant_method"] == "awq"
    tensors, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = expected[name] = weight
            continue
        layer, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
        of = torch.arange(inputs) // GROUP  # the group of each input
        if settings.get("desc_act"):
            of = of[torch.randperm(inputs)]
        values = torch.randint(2**bits, (inputs, outputs))
        zeros = torch.randint(2**bits, (inputs // GROUP, outputs))
        scales = (0.05 * torch.rand(zeros.shape) + 0.01).half()
        expected[name] = ((values - zeros[of]) * scales.float()[of]).t().contiguous()
        stored = zeros if awq or settings.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % 2**bits
        tensors |= {
            f"{layer}.qweight": packed(values, 4, AWQ) if awq else packed(values.t(), bits).t().contiguous(),
            f"{layer}.qzeros": packed(stored, bits, AWQ if awq else None),
            f"{layer}.scales": scales,
            **({} if awq else {f"{layer}.g_idx": of.to(torch.int32)}),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    return expected


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        GPTQ,
        {**GPTQ, "bits": 8, "desc_act": True},
        {**GPTQ, "bits": 2, "checkpoint_format": "gptq_v2"},
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ],
)
def test_weights_are_those_that_were_packed(tmp_path: Path, settings: dict[str, Any], storage: Any) -> None:
    folder = checkpoint(tmp_path / "model")
    expected = quantised(folder, settings)
    assert read_model_facts(section(folder)).quantization == settings["quant_method"]
    planned = plan(storage, storage)
    model = load_model(section(folder), planned)
    check_dtypes(model, planned.precision)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
    assert "quantization_config" not in model.config.to_dict()


@pytest.mark.parametrize(
    "settings",
    [
        {**GPTQ, "bits": 3},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {**GPTQ, "checkpoint_format": "marlin"},
    ],
)
def test_other_forms_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = checkpoint(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))
    with pytest.raises(ModelError) as refused:
        load_model(section(folder), plan())
    assert refused.value.code == "model.quantization_unknown"
