"""Fixtures of the fuzz tests, and the tally that stands at the end of a run of ``scripts/fuzz.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_harness import ANSWERS, TOTAL

SECONDS: dict[str, float] = {}  # test → CPU-seconds of all its inputs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, with a good row in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    return tmp_path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Adds up the answers and the CPU-seconds of one test."""
    before, began = ANSWERS.copy(), time.process_time()
    try:
        return (yield)
    finally:
        SECONDS[item.name] = time.process_time() - began
        ANSWERS.update({f"{item.name}:{word}": ANSWERS[word] - before[word] for word in ("well", "refused")})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many inputs each test threw, and what they cost."""
    if TOTAL is None:
        return
    for name, seconds in SECONDS.items():
        well, refused = ANSWERS[f"{name}:well"], ANSWERS[f"{name}:refused"]
        if inputs := well + refused:
            each = 1000 * seconds / inputs
            terminalreporter.write_line(
                f"{name:40} {inputs:5} inputs, {refused:5} refused  {seconds:7.1f} CPU-s, {each:6.1f} ms each"
            )
    terminalreporter.write_line(
        f"{ANSWERS['well'] + ANSWERS['refused']} inputs in {sum(SECONDS.values()):.0f} CPU-seconds"
    )
