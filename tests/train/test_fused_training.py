"""Runs with fused layers: over processes, resumed, in several threads, and what leaves the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from process_group import in_processes, train_all
from safetensors.torch import load_file

from halftune.model.files.result import FINISHED
from halftune.train.trainer import train

PACKED = ("data.packing=true", "training.max_steps=2")
FUSED = (*PACKED, "training.fused_layers=true")


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


@pytest.mark.slow
def test_two_processes_follow_one(recipe, losses, tmp_path: Path) -> None:
    rows = "training.per_device_train_batch_size"
    one = recipe(*FUSED, f"{rows}=2", f"training.output_dir={tmp_path}/one")
    two = recipe(*FUSED, f"{rows}=1", f"training.output_dir={tmp_path}/two", world_size=2)
    assert in_processes(2, train_all([two])) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(train(*one).folder), rel=1e-5)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(recipe, tmp_path: Path, precision: str) -> None:
    settings = (*FUSED, f"precision={precision}", "training.save_steps=1", "training.save_total_limit=9")
    whole = train(*recipe(*settings)).folder
    shutil.copytree(whole, tmp_path / "again")
    for gone in ("final", "checkpoint-2"):
        shutil.rmtree(tmp_path / "again" / gone)
    (tmp_path / "again" / FINISHED).unlink()
    train(*recipe(*settings, f"training.output_dir={tmp_path}/again"))
    one, other = adapter(whole), adapter(tmp_path / "again")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_fused_or_not_names_and_losses_are_the_same(recipe, losses, tmp_path: Path) -> None:
    own = train(*recipe(*PACKED, "training.fused_layers=false", f"training.output_dir={tmp_path}/own")).folder
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fused = train(*recipe(*FUSED, f"training.output_dir={tmp_path}/fused")).folder
    finally:
        torch.set_num_threads(before)
    assert losses(fused) == pytest.approx(losses(own), rel=1e-5)
    assert adapter(fused).keys() == adapter(own).keys()
