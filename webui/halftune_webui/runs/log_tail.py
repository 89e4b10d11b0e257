"""The ends of files that only grow: what a run printed last, the sentence that ended it, its last line of metrics."""

from __future__ import annotations

import json
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from halftune.core.files import open_file
from halftune.train.report.series import is_number
from halftune_webui.runs.started import CONSOLE, folder_of

METRICS, TRAIN_LOG = "metrics.jsonl", "train.log"
MARK = "=== "  # begins the line that a supervisor writes before each launch
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
    """What a run said last: all that it printed where the web UI started it, else its log."""
    text = tail(folder_of(run) / CONSOLE, root=run) or tail(run / TRAIN_LOG)
    return "\n".join(_shown(text)[-lines:])


def root_cause(run: Path) -> str:
    """The last error that a run printed in its latest launch; empty where it printed none."""
    return cause_in(tail(folder_of(run) / CONSOLE, root=run))


def cause_in(console: str) -> str:
    """The sentence of halftune's own error, else the last line that is none of its log."""
    _, mark, launch = f"\n{console}".rpartition(f"\n{MARK}")
    lines = [line for line in _shown(launch)[1 if mark else 0 :] if line.strip()]
    for line in reversed(lines):
        if own := _OURS.match(line):
            return line[own.end() :]
    # problems of a configuration come one a line, each with its remedy
    several = takewhile(lambda line: " · " in line and not re.match(r"[DIWE] ", line), reversed(lines))
    return "\n".join([*several][::-1] or lines[-1:])


class Said(NamedTuple):
    """A message of the command line, and the error code that stood behind it; empty where none did."""

    text: str
    code: str


def split_code(message: str) -> Said:
    """Takes the code off a message of one line."""
    found = re.fullmatch(r"(.*) \[([a-z]+\.[a-z_0-9]+)\]", message)
    return Said(found[1], found[2]) if found else Said(message, "")


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
