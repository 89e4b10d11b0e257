"""Data sets from the Hugging Face hub; ``datasets`` is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from halftune.config.facts.config_file import hub_answers
from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.optional import need
from halftune.data.readers.columnar import table_rows
from halftune.data.readers.rows import FileRows, most_of, unpacks


def hub_fingerprint(section: SourceSection) -> str:
    """Return a fingerprint of a hub data set's split."""
    return str(_load(section.path, section.split)._fingerprint)


def hub_rows(section: SourceSection) -> FileRows:
    """Return the rows of a hub data set's split; ``org/name:subset`` selects a subset.

    Raises:
        DataError: not found, empty, or far larger than its download.
    """
    found = _load(section.path, section.split)
    if not len(found):
        raise DataError("the data set is empty", where=section.path, code="data.empty")
    size, most = found.data.nbytes, most_of(found.download_size or found.data.nbytes)
    if size > most:
        remedy = "if you trust the data set, save it as .jsonl and use the file"
        raise DataError(unpacks(most), where=section.path, remedy=remedy, code="data.compressed_too_well")
    return table_rows(Path(section.path), found.with_format("arrow"), size)


def hub_stream(section: SourceSection) -> tuple[Callable[[], Any], str]:
    """A function that opens a split as an ``IterableDataset``, and the identity of the data set.

    Raises:
        DataError: not found.
    """
    datasets = need("datasets", why="a hub data set")
    name, _, subset = section.path.partition(":")
    with _errors(section.path, reachable=True):
        builder = datasets.load_dataset_builder(name, subset or None)
        builder.as_streaming_dataset(split=section.split)  # a wrong split is an error now
    return lambda: builder.as_streaming_dataset(split=section.split), f"{builder.hash}:{section.split}"


def check_available(section: SourceSection) -> None:
    """Check that a data set is cached if the hub is unreachable.

    Raises:
        DataError: the hub is unreachable and the data set is not cached.
    """
    if not hub_answers():
        _load(section.path, section.split)


@lru_cache(maxsize=4)
def _load(path: str, split: str) -> Any:
    datasets = need("datasets", why="a hub data set")
    name, _, subset = path.partition(":")
    reachable = hub_answers()
    with _errors(path, reachable=reachable), _cache_only(datasets, not reachable):
        return datasets.load_dataset(name, subset or None, split=split)


@contextmanager
def _errors(path: str, *, reachable: bool) -> Iterator[None]:
    """Inside, errors of ``datasets`` are ``DataError``s."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline, no such split or subset
        first = str(error).strip().split("\n")[0]
        remedy = "check the path or id; select a subset with org/name:subset, a split with split:"
        if not reachable:
            remedy = "download it once while online, or use a local file"
        what = f"no such local file, and loading from the hub failed: {first}"
        raise DataError(what, where=path, remedy=remedy, code="data.not_found") from error


@contextmanager
def _cache_only(datasets: Any, wanted: bool) -> Iterator[None]:
    """Make ``datasets`` read its cache only: it retries an unreachable hub six times, for minutes."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
