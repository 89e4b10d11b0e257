"""Data sets of the Hugging Face hub. The package ``datasets`` is imported only when one is asked for."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.optional import need
from halftune.data.files import FileRows, arrow_rows


def hub_fingerprint(section: SourceSection) -> str:
    """Identifies the content of a hub data set's split."""
    return str(_load(section.path, section.split)._fingerprint)


def hub_rows(section: SourceSection) -> FileRows:
    """Rows of a hub data set's split; ``org/name:subset`` names a subset."""
    rows = _load(section.path, section.split).to_list()
    if not rows:
        raise DataError("the data set is empty", where=section.path)
    return arrow_rows(Path(section.path), rows)


@lru_cache(maxsize=4)
def _load(path: str, split: str) -> Any:
    datasets = need("datasets", why="a hub data set")
    name, _, subset = path.partition(":")
    try:
        return datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline, no such split or subset
        first = str(error).strip().split("\n")[0]
        raise DataError(
            f"no such file here, and the hub gives no data set: {first}",
            where=path,
            remedy="check the path or id; a subset is written org/name:subset, another split with split:",
        ) from error
