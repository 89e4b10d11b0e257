"""Reads the rows of one file: JSON, JSONL, CSV, TSV, Parquet, Arrow, text (or .gz). Errors name file and line."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.core.files import open_input
from halftune.data.formats import FORMATS, load_format
from halftune.data.formats.fields import BadJson, find_fault, parse

AGAIN = "corrupt file or wrong extension; download it again"
# largest accepted decompression ratio; size in bytes that is always accepted
_RATIO, _SMALL = 100, 1 << 26
_BOM = "\ufeff"  # the byte order mark
LARGE = 1 << 24  # bytes of JSON Lines, Parquet or Arrow content from which rows are not held in memory
_KINDS = {list: "a list", str: "text", type(None): "null", bool: "true or false"}


@dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Attributes:
        path: the file.
        unit: unit of ``numbers``: "line", "row" or "document".
        numbers: 1-based position of each row in the file.
        rows: the rows; those of a large file are parsed again on each pass.
        notes: changes that the report counts, by index in ``rows``; complete after a pass.
    """

    path: Path
    unit: str
    numbers: Sequence[int]
    rows: Collection[dict[str, Any]]
    notes: dict[int, str] = field(default_factory=dict)


def read_file(path: Path) -> FileRows:
    """Read a file by its extension, a key of ``READERS``.

    Raises:
        DataError: malformed content (with the line) or not UTF-8.
    """
    return READERS[ending(path)](path)


def first_lines(path: Path, size: int) -> FileRows:
    """Read the complete lines within the first ``size`` bytes of a JSON Lines file.

    Raises:
        DataError: as ``read_file``.
    """
    with reading(path), open_input(path) as file:
        whole, _, _ = file.read(size).rpartition(b"\n")
    return _parse_lines(path, _decoded(whole, path))


def ending(path: Path) -> str:
    """The file extension, ``.gz`` removed."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def text_of(path: Path) -> str:
    """The file's text: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    with reading(path):
        if path.suffix.lower() == ".gz":
            raw = _unpacked(path)
        else:
            with open_input(path) as file:
                raw = file.read()
    return _decoded(raw, path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, errors of reading a file are ``DataError``s."""
    try:
        yield
    except MemoryError as error:
        what = "does not fit in memory"
        raise DataError(what, where=str(path), remedy="split the file", code="data.too_large") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = f"invalid or truncated gzip file: {error}"
        raise DataError(what, where=str(path), remedy=AGAIN, code="core.file_damaged") from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), code="core.unreadable") from error


def _unpacked(path: Path) -> bytes:
    """Decompress a gzip file; refuses decompression bombs.

    Raises:
        DataError: the content is far larger than text that compresses to this size.
        OSError, EOFError, zlib.error: invalid or truncated gzip file.
    """
    most = most_unpacked(path)
    with open_input(path) as packed, gzip.open(packed) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise bomb(path, most)
    return raw


def bomb(path: Path, most: int) -> DataError:
    """The error for a .gz file with more than ``most`` bytes of content."""
    remedy = "if you trust the file, decompress it with gunzip and use the result"
    return DataError(unpacks(most), where=str(path), remedy=remedy, code="data.compressed_too_well")


def most_unpacked(path: Path) -> int:
    """Largest accepted decompressed size of a file, in bytes."""
    return most_of(path.stat().st_size)


def most_of(packed: int) -> int:
    """Largest accepted decompressed size of ``packed`` bytes."""
    return max(_RATIO * packed, _SMALL)


def unpacks(most: int) -> str:
    return f"decompresses to more than {most:,} bytes, over {_RATIO} times its size"


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
            code="core.not_utf8",
        ) from error


def _json_lines(path: Path) -> FileRows:
    if path.is_file() and path.stat().st_size > LARGE:
        from halftune.data.streamed import streamed_lines

        if found := streamed_lines(path):
            return found
    return _parse_lines(path, text_of(path))


def _parse_lines(path: Path, text: str) -> FileRows:
    numbers, rows = [], []
    # not str.splitlines: a JSON string may contain U+2028 and similar
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        rows.append(parse_line(path, number, line))
        numbers.append(number)
    return FileRows(path, "line", numbers, rows)


def parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    """The row in line ``number`` of a JSON Lines file.

    Raises:
        DataError: malformed content.
    """
    where = f"{path} line {number}"
    try:
        row, suspect = parse(line)
    except BadJson as error:
        what = f"{error.what} at column {error.column}" if error.column else error.what
        if line.startswith(_BOM):
            what = "the line begins with a byte order mark (U+FEFF): two files were joined"
        raise DataError(what, where=where, remedy="correct or remove the line", code="data.malformed_row") from error
    return _object(row, where, suspect)


def _json(path: Path) -> FileRows:
    """A list of objects, one row, an object with one list of rows, or JSON Lines under the wrong extension."""
    text = text_of(path)
    if not text.strip():
        return FileRows(path, "row", [], [])
    try:
        value, suspect = parse(text)
    except BadJson as error:
        if text.lstrip().startswith("{") and _is_object(text.lstrip().split("\n", 1)[0]):
            return _parse_lines(path, text)
        where = f"{path} line {error.line}" if error.line else str(path)
        raise DataError(error.what, where=where, code="data.malformed_row") from error
    if isinstance(value, dict):
        value = _rows_of(value, path)
    if not isinstance(value, list):
        what = "expected a list of objects"
        raise DataError(what, where=str(path), remedy='as in [{"prompt": "…", …}, …]', code="data.not_a_list")
    rows = [_object(row, f"{path} row {number}", suspect) for number, row in enumerate(value, start=1)]
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)


def _rows_of(value: dict[str, Any], path: Path) -> list[Any]:
    """The rows of a file with one object: the object itself if it is a row, else the one list of objects in it."""
    if any(value.keys() >= set(load_format(name).required) for name in FORMATS):
        return [value]
    lists = {name: item for name, item in value.items() if _is_list_of_objects(item)}
    if any({"role", "content"} <= item[0].keys() or {"from", "value"} <= item[0].keys() for item in lists.values()):
        return [value]
    if len(lists) > 1:
        what = f"contains several lists of rows: {', '.join(lists)}"
        raise DataError(what, where=str(path), remedy="save each list to its own file", code="data.not_a_list")
    return next(iter(lists.values()), [value])


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(part, dict) for part in value)


def _is_object(line: str) -> bool:
    try:
        return isinstance(parse(line)[0], dict)
    except BadJson:
        return False


def _object(value: Any, where: str, suspect: bool) -> dict[str, Any]:
    if suspect and (what := find_fault(value)):
        raise DataError(what, where=where, remedy="correct or remove the row", code="data.malformed_row")
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "a number")
        remedy = 'write it as {"column": value, …}, for example {"prompt": "…", "completion": "…"}'
        what = f"expected an object with named columns, got {kind}"
        raise DataError(what, where=where, remedy=remedy, code="data.malformed_row")
    return value


def _csv(path: Path, delimiter: str = ",") -> FileRows:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(io.StringIO(text_of(path), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    rows: list[dict[str, Any]] = []
    try:
        for cells in reader:
            if header is None:
                header = cells
                check_names(header, f"{path} line {reader.line_num}")
            elif cells:
                if len(cells) != len(header):
                    raise DataError(
                        f"{len(cells)} cells for {len(header)} columns",
                        where=f"{path} line {reader.line_num}",
                        remedy="quote cells that contain commas or line breaks",
                        code="data.malformed_row",
                    )
                rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        what = f"not valid CSV: {error}"
        raise DataError(what, where=f"{path} line {reader.line_num}", code="data.malformed_row") from error
    return FileRows(path, "row", list(range(1, len(rows) + 1)), rows)  # a cell may span lines


def _tsv(path: Path) -> FileRows:
    return _csv(path, "\t")


def check_names(names: Sequence[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"duplicate column names: {', '.join(map(repr, twice))}",
            where=where,
            remedy="rename or remove the duplicates",
            code="data.duplicate_columns",
        )


def _parquet(path: Path) -> FileRows:
    from halftune.data.columnar import read_parquet  # not for text: one module less

    return read_parquet(path)


def _arrow(path: Path) -> FileRows:
    from halftune.data.columnar import read_arrow

    return read_arrow(path)


def _lines_or_document(path: Path) -> FileRows:
    """A .txt file: one document per line, or one document if blank lines separate paragraphs."""
    lines = text_of(path).strip().split("\n")
    if any(not line.strip() for line in lines):
        return _document(path)
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return FileRows(path, "line", [number for number, _ in found], [{"text": line} for _, line in found])


def _document(path: Path) -> FileRows:
    text = text_of(path)
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
