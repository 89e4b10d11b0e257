"""Predictions in the cache: what they are known by, and files that others wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_paper import recipe

from halftune.bench.paper import kept
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.hardware import Device
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))


def run(folder: Path, kind: str = "llama", device: Device | None = None, **sizes: Any) -> tuple[Any, Any, Any, Device]:
    """A run, its plan for an H100 or a device in its place, the model's facts, and the device."""
    config = load_config(recipe(folder, kind, sizes=sizes)).run
    facts, machine = run_facts(config), lookup("h100")
    if device:
        machine = replace(machine, name="this machine", devices=(device,), packages=(("torch", "2.13.0+cu130"),))
        machine = replace(machine, packages=(*machine.packages, ("triton", "3.7.1")))
    return config, resolve(config, machine, facts), facts, machine.devices[0]


def kept_speed(*one: Any) -> float | None:
    found = kept.known(*one)
    return found and found.tokens_per_second


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 1}, {"num_experts": 4, "num_experts_per_tok": 2}),
        ("mistral", {"sliding_window": None}, {"sliding_window": 32}),
        ("llama", {}, {"hidden_act": "gelu"}),
    ],
)
def test_another_model_has_no_speed(kind: str, first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    one = run(tmp_path, kind, **first)
    kept.keep(*one, tokens_per_second=5.0, peak=1)
    assert kept_speed(*one) == 5.0
    assert kept_speed(*run(tmp_path, kind, **second)) is None


def test_other_versions_and_rates_have_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run(tmp_path)
    kept.keep(*one, tokens_per_second=5.0, peak=1)
    original = kept.version_of
    changes: list[tuple[str, Any]] = [("__version__", "0"), ("HOST_LAUNCH", 1.0), ("SCANS", {})]
    changes += [("version_of", lambda name, of=of: "0" if name == of else original(name)) for of in kept._PACKAGES]
    row = kept.roofline_of(one[-1].name)
    assert row is not None
    changes += [("roofline_of", lambda _: replace(row, bandwidth=1.0))]
    for name, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(kept, name, value)
            assert kept_speed(*one) is None, name
    assert kept_speed(*one) == 5.0


def test_a_real_gpu_finds_the_speed_of_its_description(tmp_path: Path) -> None:
    described = run(tmp_path)
    kept.keep(*described, tokens_per_second=5.0, peak=70 * 2**30)
    real = replace(described[-1], name="NVIDIA H100 80GB HBM3")
    assert kept_speed(*run(tmp_path, device=real)) == 5.0
    assert kept_speed(*run(tmp_path, device=replace(real, memory_bytes=69 * 2**30))) is None
    assert kept_speed(*run(tmp_path, device=replace(real, name="NVIDIA H100 PCIe"))) is None


NUMBERS = ["1e-320", "9" * 400, "1e400", "NaN", "true", '"12"', "[]", "{}", "null", "-1", "0", "1e12", "9" * 5000]
TEXTS = ["[]", "null", "", "\xff", "[" * 100_000, '{"tokens_per_second": 5.0}']
FILES = [
    *(f'{{"tokens_per_second": {number}, "peak_bytes": 1}}' for number in NUMBERS),
    *(f'{{"tokens_per_second": 5.0, "peak_bytes": {number}}}' for number in NUMBERS[1:]),
    *TEXTS,
]


def test_files_of_others_are_no_speeds(tmp_path: Path) -> None:
    one = run(tmp_path)
    kept.keep(*one, tokens_per_second=5.0, peak=1)
    (path,) = (tmp_path / "cache" / "predicted").iterdir()
    for text in FILES:
        path.write_text(text, encoding="latin-1")
        assert kept.known(*one) is None, text[:60]
    path.write_text(json.dumps({"tokens_per_second": 12, "peak_bytes": 1}))
    assert kept_speed(*one) == 12.0
