"""The roofline's counts against ones made another way."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("roofline")
    del sys.modules["roofline"]


def test_a_state_alone_costs_its_products(roofline) -> None:
    """Where keys and values are much longer than a chunk, the products with the state are all there is."""
    k = v = 1 << 16
    forward, backward = roofline.gated_delta_rule(k, v, 1)
    assert forward.macs == pytest.approx(3 * k * v, rel=0.01)
    assert backward.macs == pytest.approx(6 * k * v, rel=0.01)


def test_the_floor_is_the_larger_time(roofline) -> None:
    gpu = roofline.Gpu("any", 1e12, 1e15)
    assert roofline.Work(0, 1e3).floor(gpu, 1000, 1) == pytest.approx(1e-3)
    assert roofline.Work(1e6, 1e3).floor(gpu, 1000, 1) == pytest.approx(2e-3)


def test_the_page_has_the_counts_of_today(roofline) -> None:
    assert roofline.table() in roofline.PAGE.read_text()
