"""Reads ``metrics.jsonl``: one JSON object a line for every logged step and every evaluation."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.core.files import open_file
from halftune.core.log import get_logger

log = get_logger(__name__)
NAME = "metrics.jsonl"
_LONGEST = 1 << 20  # bytes of a line


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``. A last line may have been cut off while it was written.

    Other lines that are no JSON object are left out, with a warning.
    """
    path = folder / NAME
    if not path.exists():
        return
    try:
        file = open_file(path)
    except OSError as error:
        log.warning("cannot read %s: %s", path, error.strerror)
        return
    with file:
        broken = 0
        for number in itertools.count(1):
            line = file.readline(_LONGEST)
            if broken and line:
                log.warning("%s: line %d is left out: not valid JSON", path, broken)
            if not line or len(line) == _LONGEST:  # no run writes such a line: what follows may have no end
                return
            broken = 0
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                broken = number
                continue
            if isinstance(entry, dict):
                yield entry


def digest(folder: Path, size: int) -> str:
    """The SHA-256 of the first ``size`` bytes of a run's ``metrics.jsonl``; empty where it cannot be read."""
    summed = hashlib.sha256()
    try:
        with open_file(folder / NAME) as file:
            while size > 0 and (block := file.read(min(size, _LONGEST))):
                summed.update(block)
                size -= len(block)
    except OSError:
        return ""
    return summed.hexdigest()
