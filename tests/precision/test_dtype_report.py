"""The dtype of every tensor: grouped for people, checked against the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import checkpoint, plan, section

from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import DtypeContractError
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.precision.dtypes import autocast, format_of, torch_dtype
from halftune.precision.report import check_dtypes, dtype_report

KEEP = (r"(^|\.)A_log$", r"(^|\.)dt_bias$")


@pytest.fixture
def made():
    return plan("bf16", "fp32", keep=KEEP)


@pytest.fixture
def model(tmp_path: Path, made):
    folder = checkpoint(
        tmp_path / "model",
        like="qwen3_5-tiny",
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    return attach_adapter(load_model(section(folder), made), LoraAdapter(rank=2), made, 0)


def test_equal_layers_are_one_row(model, made) -> None:
    report = dtype_report(model, made.precision)
    rows = {row.name: row for row in report.rows}
    up = rows["model.layers.*.mlp.up_proj.weight"]
    assert (up.role, up.dtype, up.planned, up.tensors, up.elements) == (
        "frozen",
        "bfloat16",
        "bfloat16",
        4,
        4 * 32 * 48,
    )
    assert rows["model.layers.*.mlp.up_proj.lora_A.weight"].role == "trained"
    assert rows["model.layers.*.mlp.up_proj.lora_A.weight"].dtype == "float32"
    assert rows["model.layers.*.linear_attn.A_log"].role == "kept fp32"
    assert rows["model.rotary_emb.inv_freq"].role == "rotary"
    assert sum(row.elements for row in report.rows if row.role != "rotary") == sum(
        p.numel() for p in model.parameters()
    )
    assert all(row.as_planned for row in report.rows)
    assert report.to_dict()["rows"][0]["as_planned"] is True
    text = report.render()
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert max(map(len, text.splitlines())) <= 120
    check_dtypes(model, made.precision)


def test_a_cast_module_is_caught_by_its_rotary_table(model, made) -> None:
    model.get_base_model().model.rotary_emb.to(torch.bfloat16)
    with pytest.raises(DtypeContractError, match=r"rotary_emb\.inv_freq: rotary table is bfloat16; must be float32"):
        check_dtypes(model, made.precision)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("layers.2.mlp.up_proj.base_layer.weight", torch.float32, "frozen weight is float32; planned: bfloat16"),
        ("layers.0.mlp.up_proj.lora_A.default.weight", torch.bfloat16, "trained weight is bfloat16; planned: float32"),
        ("layers.1.linear_attn.A_log", torch.bfloat16, "kept fp32 weight is bfloat16; planned: float32"),
        ("norm.weight", torch.float16, "frozen weight is float16; planned: bfloat16"),
    ],
)
def test_one_wrong_weight_is_named(model, made, name: str, dtype: torch.dtype, message: str) -> None:
    parameter = model.get_parameter(f"base_model.model.model.{name}")
    parameter.data = parameter.data.to(dtype)
    with pytest.raises(DtypeContractError, match=message) as caught:
        check_dtypes(model, made.precision)
    assert caught.value.where.endswith(name)
    assert [row.as_planned for row in dtype_report(model, made.precision).rows].count(False) == 1


def test_names_and_dtypes() -> None:
    for name in ("bf16", "fp16", "fp32"):
        assert format_of(torch_dtype(name)) == name
    with pytest.raises(DtypeContractError, match="float64"):
        format_of(torch.float64)


def test_autocast_is_the_plans_and_off_means_off() -> None:
    weight, x = torch.ones(2, 2), torch.ones(2, 2)
    cpu = torch.device("cpu")
    with autocast(plan("bf16").precision, cpu):
        assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        with autocast(plan("fp32").precision, cpu):
            assert torch.nn.functional.linear(x, weight).dtype == torch.float32
