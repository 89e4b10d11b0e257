"""Reads columnar files, Parquet and Arrow, in batches; refuses decompression bombs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.core.optional import need
from halftune.core.processes.time_limit import Limits
from halftune.data.readers import rows as limits
from halftune.data.readers.rows import AGAIN, FileRows, Streamed, check_names, most_unpacked, unpacks

_BATCH = 4096  # rows read from a Parquet file at a time
_SLACK, _OBJECTS = 2 << 30, 8  # bytes that libraries reserve; bytes of Python objects per byte of content
_IF_TRUSTED = "if you trust the file, convert it to .jsonl"
_ARROW_FILE = b"ARROW1"  # first bytes of an Arrow file; a stream has none
_ROWS = 50_000_000  # of a columnar file, whose compression ratio is unbounded
ARROW_NULLS = "null fields in tools or tool calls removed (Arrow adds missing fields as null)"


def _check_rows(count: int, path: Path) -> None:
    if count > _ROWS:
        what = f"{count:,} rows in one file; the limit is {_ROWS:,}"
        raise DataError(what, where=str(path), remedy="split the file", code="data.too_large")


def read_parquet(path: Path) -> FileRows:
    """Read a Parquet file.

    Raises:
        DataError: malformed, or compressed too well.
    """
    parquet = need("pyarrow.parquet", why="reading Parquet files", distribution="pyarrow")
    arrow = need("pyarrow", why="reading Parquet files")

    def batches() -> Iterator[list[dict[str, Any]]]:
        with _columnar(path, "a Parquet file", arrow):
            yield from _parquet_batches(parquet.ParquetFile(path), path)

    with _columnar(path, "a Parquet file", arrow):
        known = parquet.ParquetFile(path)
        check_names(known.schema_arrow.names, str(path))
        _check_rows(known.metadata.num_rows, path)
        size = sum(known.metadata.row_group(n).total_byte_size for n in range(known.metadata.num_row_groups))
    return _of_batches(path, known.metadata.num_rows, size, batches)


def _of_batches(path: Path, count: int, size: int, batches: Callable[[], Iterator[list[dict[str, Any]]]]) -> FileRows:
    """The rows of a columnar file with ``size`` bytes of content."""
    if size > limits.LARGE:
        return _streamed(path, count, batches)
    return arrow_rows(path, [row for rows in batches() for row in rows])


def _streamed(path: Path, count: int, batches: Callable[[], Iterator[list[dict[str, Any]]]]) -> FileRows:
    """The rows of a large file; a pass over them fills ``notes``.

    Args:
        path: the file.
        count: its rows.
        batches: starts a pass over batches of rows, as ``to_pylist`` makes them.
    """
    notes: dict[int, str] = {}

    def again() -> Iterator[dict[str, Any]]:
        start = 0
        for rows in batches():
            cleaned = arrow_rows(path, rows)
            notes.update({start + index: note for index, note in cleaned.notes.items()})
            start += len(rows)
            yield from cleaned.rows

    return FileRows(path, "row", range(1, count + 1), Streamed(count, again), notes)


@contextmanager
def _columnar(path: Path, kind: str, arrow: Any) -> Iterator[None]:
    """Inside, errors of pyarrow are ``DataError``s."""
    try:
        yield
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"not {kind}: {error}", where=str(path), remedy=AGAIN, code="core.file_damaged") from error


@contextmanager
def _limited(path: Path) -> Iterator[None]:
    """Inside, a columnar file takes no more memory than its size can explain: a value may be written once for many.

    Raises:
        DataError: it would.
    """
    most = _SLACK + _OBJECTS * most_unpacked(path)
    try:
        with Limits(0, most):
            yield
    except MemoryError as error:
        what = f"takes more than {most / 2**30:.0f} GiB of memory when it is read"
        raise DataError(what, where=str(path), remedy=_IF_TRUSTED, code="data.compressed_too_well") from error


def _parquet_batches(known: Any, path: Path) -> Iterator[list[dict[str, Any]]]:
    """Read the rows of a ``pyarrow.parquet.ParquetFile`` in batches; refuses decompression bombs.

    Compression has a declared uncompressed size. Dictionary encoding has not: one stored value may repeat in all rows.
    So each batch is small enough to fit even if every row held the largest column's whole dictionary.
    """
    most = most_unpacked(path)
    groups = [known.metadata.row_group(number) for number in range(known.metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    total = sum(column.total_uncompressed_size for column in columns)
    largest = max((column.total_uncompressed_size for column in columns), default=0)
    if total <= most:
        total = 0
        size = min(max(most // max(largest, 1), 1), _BATCH)
        made = known.iter_batches(batch_size=size, use_threads=False)  # each would reserve memory of its own
        while True:
            with _limited(path):
                batch = next(made, None)
                total += batch.nbytes if batch is not None else 0
                rows = batch.to_pylist() if batch is not None and total <= most else None
            if rows is None:
                break
            yield rows
    if total > most:
        raise DataError(unpacks(most), where=str(path), remedy=_IF_TRUSTED, code="data.compressed_too_well")


def read_arrow(path: Path) -> FileRows:
    """Read an Arrow stream (``save_to_disk`` of datasets) or an Arrow file (Feather).

    Raises:
        DataError: as ``read_parquet``.
    """
    arrow = need("pyarrow", why="reading Arrow files")
    need("pyarrow.ipc", why="reading Arrow files", distribution="pyarrow")
    with _columnar(path, "an Arrow file", arrow), _limited(path), arrow.memory_map(str(path)) as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(0)
        table = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(file).read_all()
        check_names(table.schema.names, str(path))
        _check_rows(table.num_rows, path)

    def batches() -> Iterator[list[dict[str, Any]]]:
        for batch in table.to_batches(max_chunksize=_BATCH):
            with _limited(path):
                rows = batch.to_pylist()
            yield rows

    return _of_batches(path, table.num_rows, table.nbytes, batches)


def table_rows(path: Path, found: Any, size: int) -> FileRows:
    """Read a ``datasets.Dataset`` in batches.

    Args:
        path: its name.
        found: the data set, formatted as Arrow.
        size: bytes of its content.
    """

    def batches() -> Iterator[list[dict[str, Any]]]:
        for start in range(0, len(found), _BATCH):
            yield found[start : start + _BATCH].to_pylist()

    return _of_batches(path, len(found), size, batches)


def arrow_rows(path: Path, rows: list[dict[str, Any]]) -> FileRows:
    """Remove the nulls that Arrow adds: it gives all objects of a column the same fields, null where unset.

    Rows with such nulls in a tool or a tool call get a note.
    """
    cleaned, notes = [], {}
    for index, row in enumerate(rows):
        removed = [False]
        cleaned.append({name: _without_nulls(value, name == "tools", removed) for name, value in row.items()})
        if removed[0]:
            notes[index] = ARROW_NULLS
    return FileRows(path, "row", list(range(1, len(rows) + 1)), cleaned, notes)


def _without_nulls(value: Any, in_tools: bool, removed: list[bool]) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, in_tools, removed) for item in value]
    if not isinstance(value, dict):
        return value
    if in_tools and None in value.values():
        removed[0] = True
    return {
        name: _without_nulls(item, in_tools or name in ("arguments", "tools"), removed)
        for name, item in value.items()
        if item is not None
    }
