"""The contract of every way to train some of the weights: train, resume exactly, save, load elsewhere, merge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halftune.cli import main
from halftune.core.errors import PlanError
from halftune.model.adapters import attach_adapter
from halftune.model.load import load_model
from halftune.precision.report import check_dtypes
from halftune.train.trainer import train

STEPS = (
    "training.max_steps=2",
    "training.save_steps=1",
    "data.max_length=64",
    "training.per_device_train_batch_size=2",
)
PARTS = {
    "names": ("{type: none, train_only: [q_proj, 'norm.weight$']}", {"q_proj", "norm"}),
    "last layer": ("{type: none, train_layers: 1}", {"layers.1."}),
    "first layer and head": ("{type: none, train_layers: -1, train_only: lm_head}", {"layers.0.", "embed_tokens"}),
}


def exported(run: Path, output: Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["export", str(run), "--output", str(output)])
    return int(end.value.code or 0)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_train_and_resume_exactly(recipe, small_model: Path, tmp_path: Path, name: str, compute: str) -> None:
    asked, trained = PARTS[name]
    steps = (*STEPS, f"adapter={asked}", f"precision={compute}")
    loaded, plan = recipe(*steps, f"training.output_dir={tmp_path / 'whole'}", machine="cpu-amx")
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    check_dtypes(model, plan.precision)
    chosen = {key: one for key, one in model.named_parameters() if one.requires_grad}
    assert plan.num_trainable.value == sum(one.numel() for one in chosen.values())
    assert plan.memory.weights == sum(one.nbytes for one in model.parameters())
    assert {one.dtype for one in chosen.values()} == {torch.float32}
    train(loaded, plan)
    rest = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    train(*recipe(*steps, *rest, machine="cpu-amx"))
    one, other = (load_file(tmp_path / place / "final" / "model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    base = load_file(small_model / "model.safetensors")
    moved = {key for key, tensor in one.items() if not torch.equal(tensor, base[key].to(tensor.dtype))}
    expected = {key for key in one if any(part in key for part in trained)}
    assert moved == expected or (compute == "bf16" and moved and moved < expected)  # rounded away when saved
    assert exported(tmp_path / "whole" / "checkpoint-2", tmp_path / "exported") == 0
    again = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(one[key], again[key]) for key in one)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("{type: none, train_only: [q_porj]}", "config.bad_target_modules"),
        ("{type: none, train_layers: 3}", "config.out_of_range"),
        ("{type: none, train_layers: 0}", "config.out_of_range"),
    ],
)
def test_parts_that_do_not_exist_are_refused_in_the_plan(recipe, asked: str, code: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(f"adapter={asked}")
    assert refused.value.code == code
