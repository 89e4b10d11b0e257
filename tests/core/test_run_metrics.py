"""Lines of ``metrics.jsonl`` that cannot be read: said, unless it is the last one, and nothing after them is lost."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from halftune.core.run_metrics import read_metrics


@pytest.mark.parametrize(
    ("text", "steps", "warnings"),
    [
        ('{"step": 1}\n{"step": 2}\n', [1, 2], 0),
        ('{"step": 1}\n{"step": 2, bro', [1], 0),
        ('{"step": 1}\n{"step": 2, bro\n{"step": 3}\n', [1, 3], 1),
        ('\0\0\n{"step": 1}\n[\n[\n{"step": 3}\n', [1, 3], 3),
        ("", [], 0),
    ],
)
def test_broken_lines(
    text: str, steps: list[int], warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(tmp_path)] == steps
    assert len(caplog.records) == warnings
