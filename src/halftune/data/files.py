"""Reads rows out of one file: JSON, JSONL, CSV, TSV, Parquet, Arrow, text (with .gz too). Errors name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.core.optional import need
from halftune.data.formats import FORMATS, load_format
from halftune.data.strict_json import BadJson, fault, parse

_AGAIN = "the file is damaged or of another kind: copy or download it again"
_RATIO, _SMALL = 100, 1 << 26  # how much larger content may be than a gzip file; what is always accepted, in bytes
_ROWS = 50_000_000  # of a columnar file, whose compression has no bound
_KINDS = {list: "a list", str: "text", type(None): "null", bool: "true or false"}
ARROW_NULLS = "null members in tools or tool calls left out (Arrow gives every object the members of all)"


@dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Attributes:
        path: the file.
        unit: what ``numbers`` count, "line", "row" or "document".
        numbers: 1-based, one for each row.
        rows: the rows.
        notes: what reading changed in a row that the report should count, by its position in ``rows``.
    """

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]
    notes: dict[int, str] = field(default_factory=dict)


def read_file(path: Path) -> FileRows:
    """Reads a file by its ending, which is one of ``READERS``.

    Raises:
        DataError: malformed content (with its line) or not UTF-8.
    """
    return READERS[ending(path)](path)


def first_lines(path: Path, size: int) -> FileRows:
    """The rows of a JSON Lines file whose lines end within its first ``size`` bytes.

    Raises:
        DataError: as ``read_file``.
    """
    with path.open("rb") as file:
        whole, _, _ = file.read(size).rpartition(b"\n")
    return _parse_lines(path, _decoded(whole, path))


def ending(path: Path) -> str:
    """The ending that says what a file is, without ``.gz``."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _text(path: Path) -> str:
    """The file as text: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    try:
        raw = _unpacked(path) if path.suffix.lower() == ".gz" else path.read_bytes()
    except MemoryError as error:
        raise DataError("does not fit in memory", where=str(path), remedy="split the file") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"not a whole gzip file: {error}", where=str(path), remedy=_AGAIN) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return _decoded(raw, path)


def _unpacked(path: Path) -> bytes:
    """What a gzip file holds; a small file that would fill the memory is refused before it does.

    Raises:
        DataError: its content is far larger than text compresses to.
        OSError, EOFError, zlib.error: it is not a whole gzip file.
    """
    most = max(_RATIO * path.stat().st_size, _SMALL)
    with gzip.open(path) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        what = f"unpacks to more than {most:,} bytes, {_RATIO} times its size: text does not compress so well"
        raise DataError(what, where=str(path), remedy="if you trust it, unpack it with gunzip and name the result")
    return raw


def _decoded(raw: bytes, path: Path) -> str:
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"not UTF-8: byte 0x{raw[error.start]:02x}",
            where=f"{path} line {line}",
            remedy="convert the file, e.g. iconv -f latin1 -t utf-8",
        ) from error


def _json_lines(path: Path) -> FileRows:
    return _parse_lines(path, _text(path))


def _parse_lines(path: Path, text: str) -> FileRows:
    numbers, rows = [], []
    # not str.splitlines: a JSON string may hold U+2028 and its like
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row, suspect = parse(line)
        except BadJson as error:
            what = f"{error.what} at column {error.column}" if error.column else error.what
            raise DataError(what, where=where, remedy="correct or remove the line") from error
        rows.append(_object(row, where, suspect))
        numbers.append(number)
    return FileRows(path, "line", numbers, rows)


def _json(path: Path) -> FileRows:
    """A list of objects, an object that is a row or that holds one list of rows, or in truth one object a line."""
    text = _text(path)
    if not text.strip():
        return FileRows(path, "row", [], [])
    try:
        value, suspect = parse(text)
    except BadJson as error:
        if text.lstrip().startswith("{") and _is_object(text.lstrip().split("\n", 1)[0]):
            return _parse_lines(path, text)
        where = f"{path} line {error.line}" if error.line else str(path)
        raise DataError(error.what, where=where) from error
    if isinstance(value, dict):
        value = _rows_of(value, path)
    if not isinstance(value, list):
        raise DataError("should be a list of objects", where=str(path), remedy='as in [{"prompt": "…", …}, …]')
    rows = [_object(row, f"{path} row {number}", suspect) for number, row in enumerate(value, start=1)]
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)


def _rows_of(value: dict[str, Any], path: Path) -> list[Any]:
    """The rows of a file that is one object: itself where it is a row, else the one list of objects in it."""
    if any(all(column in value for column in load_format(name).required) for name in FORMATS):
        return [value]
    lists = {
        name: item
        for name, item in value.items()
        if isinstance(item, list) and item and all(isinstance(part, dict) for part in item)
    }
    if any({"role", "content"} <= item[0].keys() or {"from", "value"} <= item[0].keys() for item in lists.values()):
        return [value]
    if len(lists) > 1:
        raise DataError(
            f"holds several lists of rows: {', '.join(lists)}",
            where=str(path),
            remedy="write each into a file of its own",
        )
    return next(iter(lists.values()), [value])


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse(line)[0], dict)
    except BadJson:
        return False


def _object(value: Any, where: str, suspect: bool) -> dict[str, Any]:
    if suspect and (what := fault(value)):
        raise DataError(what, where=where, remedy="correct or remove the row")
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "a number")
        remedy = 'write it as {"column": value, …}, for example {"prompt": "…", "completion": "…"}'
        raise DataError(f"a row should be an object with named columns, not {kind}", where=where, remedy=remedy)
    return value


def _csv(path: Path, delimiter: str = ",") -> FileRows:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    rows: list[dict[str, Any]] = []
    try:
        for cells in reader:
            if header is None:
                header = cells
                _check_names(header, f"{path} line {reader.line_num}")
            elif cells:
                if len(cells) != len(header):
                    raise DataError(
                        f"{len(cells)} cells under {len(header)} columns",
                        where=f"{path} line {reader.line_num}",
                        remedy="put texts that hold commas or line breaks in double quotes",
                    )
                rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"not valid CSV: {error}", where=f"{path} line {reader.line_num}") from error
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)  # a text may hold many lines


def _tsv(path: Path) -> FileRows:
    return _csv(path, "\t")


def _check_names(names: Sequence[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"several columns have the same name: {', '.join(map(repr, twice))}",
            where=where,
            remedy="rename or remove all but one",
        )


def _check_rows(count: int, path: Path) -> None:
    if count > _ROWS:
        what = f"holds {count:,} rows, at most {_ROWS:,} are accepted in one file"
        raise DataError(what, where=str(path), remedy="split the file")


def _parquet(path: Path) -> FileRows:
    parquet = need("pyarrow.parquet", why="reading Parquet files", distribution="pyarrow")
    arrow = need("pyarrow", why="reading Parquet files")
    try:
        known = parquet.ParquetFile(path)
        _check_names(known.schema_arrow.names, str(path))
        _check_rows(known.metadata.num_rows, path)
        rows = parquet.read_table(path).to_pylist()
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"not a Parquet file: {error}", where=str(path), remedy=_AGAIN) from error
    return arrow_rows(path, rows)


def _arrow(path: Path) -> FileRows:
    """What ``save_to_disk`` of datasets writes (a stream), or an Arrow file (Feather)."""
    arrow = need("pyarrow", why="reading Arrow files")
    need("pyarrow.ipc", why="reading Arrow files", distribution="pyarrow")
    try:
        with arrow.memory_map(str(path)) as file:
            try:
                table = arrow.ipc.open_stream(file).read_all()
            except arrow.ArrowInvalid:
                file.seek(0)
                table = arrow.ipc.open_file(file).read_all()
            _check_names(table.schema.names, str(path))
            _check_rows(table.num_rows, path)
            return arrow_rows(path, table.to_pylist())
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"not an Arrow file: {error}", where=str(path), remedy=_AGAIN) from error


def arrow_rows(path: Path, rows: list[dict[str, Any]]) -> FileRows:
    """Rows that come from Arrow, which gives every object of a column the members of all of them, null where unset.

    Such nulls are taken out inside columns; where they stood in a tool or a tool call, the row is noted.
    """
    cleaned, notes = [], {}
    for index, row in enumerate(rows):
        told = [False]
        cleaned.append({name: _without_nulls(value, name == "tools", told) for name, value in row.items()})
        if told[0]:
            notes[index] = ARROW_NULLS
    return FileRows(path, "row", list(range(1, len(rows) + 1)), cleaned, notes)


def _without_nulls(value: Any, telling: bool, told: list[bool]) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, telling, told) for item in value]
    if not isinstance(value, dict):
        return value
    if telling and None in value.values():
        told[0] = True
    return {
        name: _without_nulls(item, telling or name in ("arguments", "tools"), told)
        for name, item in value.items()
        if item is not None
    }


def _lines_or_document(path: Path) -> FileRows:
    """A .txt file: one document a line, unless blank lines part paragraphs, which makes the file one document."""
    lines = _text(path).strip().split("\n")
    if any(not line.strip() for line in lines):
        return _document(path)
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return FileRows(path, "line", [number for number, _ in found], [{"text": line} for _, line in found])


def _document(path: Path) -> FileRows:
    text = _text(path)
    rows = [{"text": text}] if text.strip() else []
    return FileRows(path, "document", list(range(1, len(rows) + 1)), rows)


READERS: dict[str, Callable[[Path], FileRows]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _lines_or_document,
    ".md": _document,
    ".rst": _document,
    ".py": _document,
}
