"""The ends of files that only grow: what a run printed last, the sentence that ended it, its last line of metrics."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from halftune.core.files import open_file
from halftune_webui.runs.started import CONSOLE, folder_of

METRICS, TRAIN_LOG = "metrics.jsonl", "train.log"
MARK = "=== "  # begins the line that a keeper writes before each sitting
_BYTES = 65_536
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OURS = re.compile(r"^halftune( \w+)?: ")


def tail(path: Path, size: int = _BYTES, *, root: Path | None = None) -> str:
    """The last ``size`` bytes of a run's file as text, from the beginning of a line; empty where it cannot be read."""
    try:
        with open_file(path, root=root) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            data = file.read(size)
    except OSError:
        return ""
    if end > size:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")


def log_tail(run: Path, lines: int = 60) -> str:
    """What a run said last: all that it printed where the board started it, else its log."""
    text = tail(folder_of(run) / CONSOLE, root=run) or tail(run / TRAIN_LOG)
    return "\n".join(_shown(text)[-lines:])


def root_cause(run: Path) -> str:
    """The last error that a run printed in its latest sitting; empty where it printed none."""
    return cause_in(tail(folder_of(run) / CONSOLE, root=run))


def cause_in(console: str) -> str:
    """The sentence of halftune's own error, else the last line that is none of its log."""
    sitting = console.rpartition(f"\n{MARK}")[2] if f"\n{MARK}" in console else console
    lines = _shown(sitting)
    if lines and (console.startswith(MARK) or f"\n{MARK}" in console):
        lines = lines[1:]
    lines = [line for line in lines if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        if own := _OURS.match(lines[number]):
            return lines[number][own.end() :]
    several: list[str] = []  # problems of a configuration come one a line, each with its remedy
    for line in reversed(lines):
        if " · " not in line or re.match(r"[DIWE] ", line):
            break
        several.insert(0, line)
    return "\n".join(several) if several else (lines[-1] if lines else "")


def _shown(text: str) -> list[str]:
    """Lines as a terminal would show them: a bar that was drawn again and again is there once."""
    return [_TERMINAL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n") if line]


def last_metrics(run: Path) -> dict[str, Any]:
    """The last line of metrics that has a loss; empty where there is none."""
    for line in reversed(tail(run / METRICS, 8192).splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "loss" in entry and is_number(entry.get("step")):
            return {**entry, "loss": entry["loss"] if is_number(entry["loss"]) else None}
    return {}


def is_number(value: Any) -> bool:
    """Whether a value of a JSON line is a number that can be reckoned with; infinity is none, nor is one too large."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
