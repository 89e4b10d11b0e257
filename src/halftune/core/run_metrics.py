"""Reads ``metrics.jsonl``: one JSON object a line for every logged step and every evaluation."""

from __future__ import annotations

import hashlib
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
    """The lines of a run's ``metrics.jsonl``; a last line that was cut off while being written ends them."""
    path = folder / NAME
    if not path.exists():
        return
    try:
        file = open_file(path)
    except OSError as error:
        log.warning("cannot read %s: %s", path, error.strerror)
        return
    with file:
        while line := file.readline(_LONGEST):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                return
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
