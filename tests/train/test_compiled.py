"""Compiled layers: one graph a layer, the same losses, with fused operators and packed rows."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import in_processes
from torch._dynamo.utils import counters

from halftune.model import compiled
from halftune.train.trainer import train

CHEAP = "aot_eager"  # makes the same graphs, and runs them without a compiler
SETTINGS = ("training.per_device_train_batch_size=2", "data.max_length=48")


def _train(loaded: Any, plan: Any, _rank: int) -> None:
    train(loaded, plan)


def _train_in_graphs(loaded: Any, plan: Any, _rank: int) -> None:
    counters.clear()
    train(loaded, plan)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


# inductor gives torch's folder to the compiler without quotes, and writes AVX-512 code where torch is told to use none.
NO_INDUCTOR = " " in torch.__file__ or os.environ.get("ATEN_CPU_CAPABILITY") == "default"
INDUCTOR = pytest.param(
    "lora", "true", "inductor", marks=pytest.mark.skipif(NO_INDUCTOR, reason="inductor cannot compile here")
)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "packing", "backend"), [INDUCTOR, ("none", "true", CHEAP)])
def test_compiled_layers_train_the_same(
    recipe: Any, losses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, packing: str, backend: str
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", backend)
    settings = (
        *SETTINGS,
        "training.max_steps=3",
        f"data.packing={packing}",
        *(("adapter=none",) if adapter == "none" else ()),
    )
    own = losses(train(*recipe(*settings, f"training.output_dir={tmp_path}/own")).folder)
    torch._dynamo.reset()
    counters.clear()
    loaded, plan = recipe(*settings, "training.torch_compile=true", f"training.output_dir={tmp_path}/compiled")
    assert plan.batch.fused_layers.value
    found = losses(train(loaded, plan).folder)
    assert found == pytest.approx(own, rel=1e-5)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.slow
def test_compiled_layers_in_shards(recipe: Any, losses: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", CHEAP)
    settings = (*SETTINGS, "data.packing=true", "distributed.strategy=fsdp2", "training.max_steps=2")
    curves = []
    for asked, train_one in (("false", _train), ("true", _train_in_graphs)):
        given = (f"training.torch_compile={asked}", f"training.output_dir={tmp_path}/{asked}")
        pair = recipe(*settings, *given, world_size=2)
        assert in_processes(2, partial(train_one, *pair)) == [0, 0]
        curves.append(losses(tmp_path / asked))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
