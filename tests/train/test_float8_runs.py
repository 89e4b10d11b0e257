"""Full fine-tuning with linear layers in float8, emulated: losses beside bf16, resumed, compiled, in shards."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import in_processes
from safetensors.torch import load_file
from tiny_model import because
from torch._dynamo.utils import counters

from halftune.model import compiled
from halftune.precision import TRAINED_FLOAT8
from halftune.train.trainer import train

pytest.importorskip("torchao")
FULL = ("adapter=none", "precision=bf16")


def in_float8(loaded: Any, plan: Any) -> tuple[Any, Any]:
    """The recipe with a plan that a CPU does not get."""
    return loaded, replace(plan, precision=replace(plan.precision, linear=because(TRAINED_FLOAT8)))


def test_losses_are_near_those_of_bf16_and_a_resumed_run_is_bit_identical(
    recipe: Any, losses: Any, tmp_path: Path
) -> None:
    """With gradient checkpointing, whose second forward pass rounds the same numbers, and with answers."""
    every_third = ("training.max_steps=6", "training.save_steps=3", "training.eval_steps=3", "data.eval_split=0.1")
    answers = ("logging.sample_prompts=[Add.]", "generation.max_new_tokens=2")
    words = (*FULL, *every_third, *answers, "training.gradient_checkpointing=true")
    bf16 = losses(train(*recipe(*words, f"training.output_dir={tmp_path}/bf16")).folder)
    whole = train(*in_float8(*recipe(*words, f"training.output_dir={tmp_path}/whole"))).folder
    found = losses(whole)
    apart = max(abs(a - b) for a, b in zip(found, bf16, strict=True)) / bf16[0]
    assert bf16[-1] < 0.9 * bf16[0]
    assert 0 < apart < 0.02, (found, bf16)

    plain, first = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("bf16", "whole"))
    assert {name: tensor.dtype for name, tensor in first.items()} == {name: one.dtype for name, one in plain.items()}
    for made_later in ("final", "checkpoint-6"):
        shutil.rmtree(whole / made_later)
    (whole / "finished.json").unlink()
    assert train(*in_float8(*recipe(*words, f"training.output_dir={whole}"))).folder == whole
    second = load_file(whole / "final" / "model.safetensors")
    assert losses(whole)[-3:] == found[-3:]
    assert (whole / "samples.json").exists()  # torchao's tensors fail in inference mode
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_compiled_layers_are_one_graph_each(
    recipe: Any, losses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    words = (*FULL, "data.packing=true", "training.max_steps=2")
    own = losses(train(*in_float8(*recipe(*words, f"training.output_dir={tmp_path}/own"))).folder)
    torch._dynamo.reset()
    counters.clear()
    given = recipe(*words, "training.torch_compile=true", f"training.output_dir={tmp_path}/compiled")
    found = losses(train(*in_float8(*given)).folder)
    assert found == pytest.approx(own, rel=1e-3)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def _train(loaded: Any, plan: Any, _rank: int) -> None:
    train(loaded, plan)


@pytest.mark.nightly
def test_shards_train_as_one(recipe: Any, losses: Any, tmp_path: Path) -> None:
    """Linear layers are gathered in bf16, and rounded once more there."""
    words = (*FULL, "training.max_steps=3", "training.per_device_train_batch_size=4")
    one = losses(train(*in_float8(*recipe(*words, "training.gradient_accumulation_steps=2"))).folder)
    words = (*words, "distributed.strategy=fsdp2", f"training.output_dir={tmp_path}/shards")
    pair = in_float8(*recipe(*words, world_size=2))
    assert in_processes(2, partial(_train, *pair)) == [0, 0]
    assert losses(tmp_path / "shards") == pytest.approx(one, rel=1e-2)
