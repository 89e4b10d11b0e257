"""The scaling study: what is on paper follows from its formulas, and those say what torch really sends."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("scaling_paper")


def test_bytes_and_seconds_by_hand(paper: ModuleType) -> None:
    shape = paper.Shape("one", 1e9, 10, 1000, 1e6)
    machine = paper.Machine(flops=1e15, utilisation=0.5, hop_inside=0.0, hop_between=0.0)
    ddp = paper.step(shape, "full", "ddp", 8, 1000, machine)
    assert ddp.sent == pytest.approx(2 * 7 / 8 * 4e9)
    assert ddp.communication == pytest.approx(7e9 / 450e9)
    assert ddp.compute == pytest.approx(8e9 * 1000 / 0.5e15)
    fsdp = paper.step(shape, "full", "fsdp2", 16, 1000, machine)
    assert fsdp.sent == pytest.approx(15 / 16 * (2 + 2 + 4) * 1e9)
    assert fsdp.communication == pytest.approx(fsdp.sent / 400e9), "eight adapters of 50 GB/s for one ring"
    lora = paper.step(shape, "lora", "ddp", 8, 1000, machine)
    assert lora.sent == pytest.approx(2 * 7 / 8 * 4e6)
    assert lora.compute == pytest.approx(0.75 * ddp.compute)
    assert paper.step(shape, "full", "ddp", 1, 1000, machine).communication == 0.0


def test_where_a_strategy_stops_paying(paper: ModuleType) -> None:
    small, large = paper.SHAPES
    for strategy in paper.STRATEGIES:
        made = paper.step(small, "lora", strategy, 64)
        least = paper.fewest_tokens(made)
        at_the_point = paper.step(small, "lora", strategy, 64, least)
        assert at_the_point.communication == pytest.approx(at_the_point.compute)
    low, high = made.efficiency
    assert low < high == 1.0
    most = paper.most_gpus(large, "full", "fsdp2", paper.BATCH)
    share, more = (paper.step(large, "full", "fsdp2", n, paper.BATCH / n) for n in (most, 2 * most))
    assert share.communication <= share.compute
    assert more.communication > more.compute
    assert paper.most_gpus(large, "full", "fsdp2", paper.BATCH, paper.ETHERNET) < most
    assert sum("does not fit" in line for line in paper.tables()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_torch_sends_what_the_formulas_say(paper: ModuleType, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    scaling = importlib.import_module("scaling")
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have trained alone in this process
    monkeypatch.setattr(scaling, "ROWS", 2)
    monkeypatch.setattr(scaling, "LENGTH", 32)
    for told in scaling.run("full", strategy, 2):
        assert told["sent"] == pytest.approx(told["expected"], abs=1000)  # beside them a few sums of numbers
        assert told["sent"] > 1e6
