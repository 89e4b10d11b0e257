"""Reads rows out of one file: JSON, JSONL, CSV, TSV, Parquet, text; each with .gz too. Errors name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.core.optional import need


@dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Attributes:
        path: the file.
        unit: what ``numbers`` count, "line", "row" or "document".
        numbers: 1-based, one for each row.
        rows: the rows.
    """

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]


def read_file(path: Path) -> FileRows:
    """Reads a file by its ending.

    Raises:
        DataError: unknown ending, malformed content (with its line) or not UTF-8.
    """
    reader = READERS.get(ending(path))
    if reader is None:
        raise DataError(f"unknown kind of file {path.suffix!r}", where=str(path), remedy=f"known: {', '.join(READERS)}")
    return reader(path)


def ending(path: Path) -> str:
    """The ending that says what a file is, without ``.gz``."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _text(path: Path) -> str:
    """The file as text: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"not a whole gzip file: {error}", where=str(path)) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
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
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"not valid JSON: {error.msg} at column {error.colno}",
                where=f"{path} line {number}",
                remedy="correct or remove the line",
            ) from error
        rows.append(_object(row, f"{path} line {number}"))
        numbers.append(number)
    return FileRows(path, "line", numbers, rows)


def _json(path: Path) -> FileRows:
    """A list of objects, an object that holds one list of objects, or in truth one object a line."""
    text = _text(path)
    if not text.strip():
        return FileRows(path, "row", [], [])
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and _is_object(text.lstrip().split("\n", 1)[0]):
            return _parse_lines(path, text)
        raise DataError(f"not valid JSON: {error.msg}", where=f"{path} line {error.lineno}") from error
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        value = lists[0] if len(lists) == 1 and len(value) == 1 else [value]
    if not isinstance(value, list):
        raise DataError("should be a list of objects", where=str(path))
    rows = [_object(row, f"{path} row {number}") for number, row in enumerate(value, start=1)]
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"a row should be an object with named columns, not {type(value).__name__}", where=where)
    return value


def _csv(path: Path, delimiter: str = ",") -> FileRows:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    numbers, rows = [], []
    try:
        for cells in reader:
            if header is None:
                header = cells
            elif cells:
                if len(cells) != len(header):
                    raise DataError(
                        f"{len(cells)} cells under {len(header)} columns",
                        where=f"{path} line {reader.line_num}",
                        remedy="put texts that hold commas or line breaks in double quotes",
                    )
                numbers.append(reader.line_num)
                rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"not valid CSV: {error}", where=f"{path} line {reader.line_num}") from error
    return FileRows(path, "line", numbers, rows)


def _tsv(path: Path) -> FileRows:
    return _csv(path, "\t")


def _parquet(path: Path) -> FileRows:
    parquet = need("pyarrow.parquet", why="reading Parquet files", distribution="pyarrow")
    arrow = need("pyarrow", why="reading Parquet files")
    try:
        rows = parquet.read_table(path).to_pylist()
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"not a Parquet file: {error}", where=str(path)) from error
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)


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
    ".txt": _lines_or_document,
    ".md": _document,
    ".rst": _document,
    ".py": _document,
}
