"""Runs that are killed with SIGKILL at random moments end as if nothing had happened."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.state import AcceleratorState
from patience import LIMIT

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``script("kill_test", "--kills", 5)`` → what it prints, in a fork of this process: no import."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.syspath_prepend(SCRIPTS / "bench")

    def run(name: str, *words: object, codes: tuple[int, ...] = (0,)) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        child = multiprocessing.get_context("fork").Process(target=main_of, args=(importlib.import_module(name),))
        child.start()
        child.join(2 * LIMIT)  # several runs, one after the other
        child.kill()
        said = "".join(capfd.readouterr())
        assert child.exitcode in codes, said
        return said

    return run


def main_of(script: ModuleType) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have trained alone
    script.main()


@pytest.mark.slow
def test_kills_end_bit_identically(script: Callable[..., str], tmp_path: Path) -> None:
    """An adapter with dropout; ``scripts/kill_test.py`` makes a hundred, with every kind of run among them."""
    assert "3 kills" in script("kill_test", "--kills", 3, "--seed", 39, "--room", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ways"),
    [
        ("dpo-precomputed", ("start", "save")),
        ("kto", ("save",)),
        ("grpo", ("answer", "save")),
        ("distill-own", ("answer",)),
    ],
)
def test_kills_of_methods_end_bit_identically(
    case: str, ways: tuple[str, ...], script: Callable[..., str], tmp_path: Path
) -> None:
    """``python scripts/kill_test.py --methods`` kills all of them, in every way."""
    words = ("--methods", "--case", case, "--kills", len(ways), "--room", tmp_path, "--ways", *ways)
    assert f"{len(ways)} kills" in script("kill_test", *words)


@pytest.mark.slow
def test_the_newest_checkpoint_is_valid_whenever_somebody_looks(script: Callable[..., str]) -> None:
    """``python scripts/soak.py`` looks for a quarter of an hour; here until it has seen something."""
    said = script("soak", "--minutes", 0.08, "--every", 0.4, codes=(0, 1))  # memory grows at first
    assert "WRONG" not in said
    assert re.search(r"saw [1-9]", said), said


@pytest.mark.slow
def test_two_kills_of_one_of_two_processes_end_bit_identically(script: Callable[..., str], tmp_path: Path) -> None:
    """``python scripts/kill_test.py --processes 2`` kills in adapters and DDP, too."""
    words = ("--processes", 2, "--kills", 2, "--case", "fsdp2-full", "--room", tmp_path)
    assert "2 kills" in script("kill_test", *words)
