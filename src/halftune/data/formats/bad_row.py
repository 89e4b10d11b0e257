"""The error for a row that stops training: it names the row, or the two formats that a source mixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from halftune.config.sections.data import SourceSection
from halftune.config.sections.method import Method
from halftune.core.errors import DataError
from halftune.data.formats.conversation import BadRow
from halftune.data.formats.detect import Reading, detect_for


def bad_row(
    error: BadRow,
    rows: Iterable[Mapping[str, Any]],
    place: Callable[[int], str],
    reading: Reading,
    section: SourceSection,
    method: Method,
) -> DataError:
    """The error for the row whose index among ``rows`` is ``error.args[0]``.

    Args:
        error: what is wrong with it.
        rows: the source's rows.
        place: the place of a row in errors, by its index.
        reading: how the rows are read.
        section, method: of the source and the run.
    """
    index, what, remedy, code = error.args
    needed = {reading.columns[name] for name in reading.format.required}
    row = next(islice(rows, index, None))
    own = _format_of(row, section, method) if needed.isdisjoint(row) else ""
    other = next((at for at, one in enumerate(rows) if needed & one.keys()), None) if own else None
    if own and other is not None:  # the later one differs from the rows before it
        formats = {index: own, other: reading.format.name}
        first, index = sorted(formats)
        what = f"format {formats[index]}, but {place(first)} has format {formats[first]}"
        remedy = "list files of each format as sources of their own under data.train"
        code = "data.ambiguous_folder"
    return DataError(what, where=place(index), remedy=remedy, code=code)


def _format_of(row: Mapping[str, Any], section: SourceSection, method: Method) -> str:
    """The format of a row by itself; "" if it fits none."""
    try:
        return detect_for(method, [row], section).format.name
    except DataError:
        return ""
