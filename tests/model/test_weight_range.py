"""Numbers that fp16 cannot hold, and tensors that a load rounds: refused and told, never changed in silence."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import because, checkpoint, plan, section

from halftune.core.errors import ModelError
from halftune.model.load.lazy_weights import CPU, LazyWeights
from halftune.model.load.load import load_model
from halftune.model.result.save import write_model
from halftune.plan import Plan

NAME = "model.layers.1.mlp.up_proj.weight"


def holding(folder: Path, dtype: torch.dtype, value: float, name: str = NAME) -> Path:
    """A checkpoint with one number that is not like the others."""
    weights = load_file(checkpoint(folder, dtype) / "model.safetensors")
    weights[name][-1, -1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def full(compute: str) -> Plan:
    """fp32 masters that compute in a half format."""
    planned = plan(compute)
    return replace(planned, precision=replace(planned.precision, storage=because("fp32")))


@pytest.mark.parametrize("planned", [plan("fp16"), full("fp16")], ids=["frozen", "masters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e5, -1e5, float("inf"), float("nan")])
def test_a_number_beyond_fp16_is_refused_on_load(
    tmp_path: Path, planned: Plan, dtype: torch.dtype, value: float
) -> None:
    folder = holding(tmp_path / "model", dtype, value)
    with pytest.raises(ModelError) as caught:
        load_model(section(folder), planned)
    shown = f"{abs(float(torch.tensor(value, dtype=dtype))):,.6g}"
    assert f"{NAME} contains {shown}" in caught.value.what
    assert "65,504" in caught.value.what
    assert caught.value.where == str(folder)
    assert "precision: fp32" in caught.value.remedy


@pytest.mark.parametrize("value", [65504.0, 65519.0, -65504.0])
def test_what_fp16_holds_passes(tmp_path: Path, value: float) -> None:
    folder = holding(tmp_path / "model", torch.float32, value)
    model = load_model(section(folder), plan("fp16"))
    assert model.get_parameter(NAME).abs().max() == 65504.0


@pytest.mark.parametrize("planned", [plan("bf16"), plan("fp32"), full("bf16"), plan("fp16", keep=(r"up_proj",))])
def test_formats_with_the_range_take_it(tmp_path: Path, planned: Plan) -> None:
    model = load_model(section(holding(tmp_path / "model", torch.float32, 1e5)), planned)
    assert model.get_parameter(NAME).abs().max() > 65504.0


def test_weights_that_are_left_in_their_files_are_checked_when_they_are_read(tmp_path: Path) -> None:
    lazy = LazyWeights()
    model = load_model(section(holding(tmp_path / "model", torch.float32, 1e5)), plan("fp16"), lazy=lazy)
    with lazy.opened():
        for name, weight in model.named_parameters():
            rows = weight.shape[0] // 2
            lazy.read(name, torch.empty_like(weight[:rows], device=CPU), 0)
        with pytest.raises(ModelError, match=r"up_proj\.weight contains 100,000"):
            lazy.read(NAME, torch.empty_like(model.get_parameter(NAME), device=CPU))


def test_a_number_beyond_fp16_is_not_saved(tmp_path: Path) -> None:
    model = load_model(section(holding(tmp_path / "model", torch.float32, 1e5)), plan("fp32"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="contains 100,000") as caught:
        write_model(model, "fp16", (), tmp_path / "out")
    assert NAME in caught.value.what
    write_model(model, "fp16", (r"up_proj",), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")[NAME].dtype == torch.float32


def test_the_log_says_which_tensors_are_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path / "model", torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    weights = {name: one.float() if "norm" in name else one for name, one in weights.items()}
    weights[NAME] = weights[NAME].half()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "halftune"):
        load_model(section(folder), plan("bf16", keep=(r"^model\.norm",)))
    said = [record.getMessage() for record in caplog.records if "tensors from" in record.getMessage()]
    count = len(weights)
    layers = "model.layers.*.input_layernorm.weight, model.layers.*.post_attention_layernorm.weight"
    assert sorted(said) == [
        f"rounded 1 of {count} tensors from fp16 to bf16 on load: model.layers.*.mlp.up_proj.weight",
        f"rounded 4 of {count} tensors from fp32 to bf16 on load: {layers}",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "halftune"):
        load_model(section(folder), plan("fp32"))
    assert "tensors from" not in caplog.text
