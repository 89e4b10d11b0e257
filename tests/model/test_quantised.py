"""Quantised checkpoints: told apart, widened on load, computed with in the plan's format, or refused before load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, plan, section
from torch import nn

from halftune.config.facts.model import read_model_facts
from halftune.config.weight_formats import method_of, refusal
from halftune.core.errors import MissingPackageError, ModelError
from halftune.model.load import quantised
from halftune.model.load.load import load_model
from halftune.precision.report import check_dtypes


@pytest.mark.parametrize(
    ("settings", "method", "known"),
    [
        (None, None, True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes_4bit", True),
        ({"load_in_8bit": True}, "bitsandbytes_8bit", True),
        ({"quant_method": "fp8"}, "fp8", True),
        ({"quant_method": "gptq", "bits": 4}, "gptq", True),
        ({"quant_method": "frobnicate"}, "frobnicate", False),
        ({"quant_method": "int8"}, "int8", False),
    ],
)
def test_which_method(settings: Any, method: str | None, known: bool) -> None:
    assert method_of(settings, "here") == method
    assert (refusal(method) == "") is known


@pytest.mark.parametrize("settings", [[1], "int4", {}, {"bits": 4}, {"quant_method": 4}])
def test_settings_that_name_no_method(settings: Any) -> None:
    with pytest.raises(ModelError, match=r"quantization_config"):
        method_of(settings, "here")


def quantise(folder: Path, settings: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": settings}))


@pytest.mark.parametrize("storage", ["bf16", "fp32", "fp16"])
def test_fp8_is_written_out_in_the_storage_dtype(tmp_path: Path, storage: Any) -> None:
    folder = checkpoint(tmp_path / "model")
    tensors, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = expected[name] = tensor
        if "_proj.weight" in name:
            scale = (tensor.abs().max() / 448).reshape(1, 1).float()
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            expected[name] = tensors[name].float() * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    quantise(folder, {"quant_method": "fp8", **blocks})
    assert read_model_facts(section(folder)).quantization == "fp8"
    planned = plan(storage, storage)
    model = load_model(section(folder), planned)
    check_dtypes(model, planned.precision)
    dtype = model.lm_head.weight.dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(dtype)), name
    assert "quantization_config" not in model.config.to_dict(), "what is saved of it says what it is"


def test_what_cannot_be_loaded_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "model")
    quantise(folder, {"quant_method": "aqlm", "bits": 2})
    with pytest.raises(ModelError, match="quantisation method aqlm"):
        load_model(section(folder), plan())
    quantise(folder, {"load_in_4bit": True})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackageError, match="a checkpoint in bitsandbytes_4bit requires package bitsandbytes"):
        load_model(section(folder), plan())


def test_four_bit_layers_compute_in_the_plans_format() -> None:
    class Linear4bit(nn.Linear):
        compute_dtype, compute_type_is_set, support_avx512bf16_for_cpu = torch.float32, False, True

    model = nn.ModuleDict({"a": Linear4bit(64, 32), "odd": Linear4bit(32, 32), "b": nn.Linear(2, 2)})
    assert quantised.compute_as_planned(model, plan("bf16", "fp32"), for_training=False) == 2
    assert model["a"].compute_dtype == torch.bfloat16
    assert model["a"].compute_type_is_set
    assert model["a"].support_avx512bf16_for_cpu
    assert not model["odd"].support_avx512bf16_for_cpu, "no block of 64 in a row"
    quantised.compute_as_planned(model, plan("bf16", "fp32"), for_training=True)
    assert not model["a"].support_avx512bf16_for_cpu


def test_four_bit_layers_keep_their_gradients_after_an_evaluation() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({name: bitsandbytes.nn.Linear4bit(width, 64) for name, width in (("a", 128), ("odd", 96))})
    model.to("cpu")
    for name, layer in model.items():
        layer.weight = bitsandbytes.nn.Params4bit(torch.randn(64, layer.in_features), requires_grad=False).to("cpu")
        x = torch.randn(1, 3, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
        quantised.compute_as_planned(model, plan("bf16", "fp32"), for_training=True)
        (before,) = torch.autograd.grad(layer.train()(x).sum(), x)
        with torch.no_grad():
            layer.eval()(x.detach())
        (after,) = torch.autograd.grad(layer.train()(x).sum(), x)
        assert torch.equal(before, after), name
