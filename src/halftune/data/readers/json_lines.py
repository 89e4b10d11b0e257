"""Reads JSON and JSON Lines, plain or .gz; large files are parsed again on each pass instead of held in memory."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from halftune.core.errors import DataError
from halftune.core.files import open_input
from halftune.data.formats import FORMATS, load_format
from halftune.data.formats.fields import BadJson, find_fault, parse
from halftune.data.readers import rows as limits
from halftune.data.readers.rows import FileRows, Streamed, bomb, decoded, most_unpacked, reading, text_of

_BOM = "\ufeff"  # the byte order mark
_KINDS = {list: "a list", str: "text", type(None): "null", bool: "true or false"}
_BOM_BYTES, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_PRINTABLE = range(0x21, 0x7F)


def read_json_lines(path: Path) -> FileRows:
    """Read a JSON Lines file: one object a line.

    Raises:
        DataError: malformed content (with the line), not UTF-8, or compressed too well.
    """
    if path.is_file() and path.stat().st_size > limits.LARGE and (found := streamed_lines(path)):
        return found
    return _parse_lines(path, text_of(path))


def first_lines(path: Path, size: int) -> FileRows:
    """Read the complete lines within the first ``size`` bytes of a JSON Lines file.

    Raises:
        DataError: as ``read_file``.
    """
    with reading(path), open_input(path) as file:
        whole, _, _ = file.read(size).rpartition(b"\n")
    return _parse_lines(path, decoded(whole, path))


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


def read_json(path: Path) -> FileRows:
    """Read a list of objects, one row, an object with one list of rows, or JSON Lines under the wrong extension.

    Raises:
        DataError: as ``read_json_lines``.
    """
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


def streamed_lines(path: Path) -> FileRows | None:
    """The rows of a JSON Lines file, plain or .gz; None for UTF-16, which is read whole.

    Only the line numbers of the rows are held. A malformed line raises in the pass that reaches it.

    Raises:
        DataError: not readable, or compressed too well.
    """
    with reading(path):
        numbers = _numbers(path)
    if numbers is None:
        return None

    checked = False

    def again() -> Iterator[dict[str, Any]]:
        nonlocal checked
        read = _checked if checked else parse_line
        with reading(path), _opened(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                text = _utf8(line, path)
                if text.strip():
                    yield read(path, number, text)
        checked = True

    return FileRows(path, "line", numbers, Streamed(len(numbers), again))


def line_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """1-based line numbers and rows of a JSON Lines file, plain or .gz, in one pass.

    Raises:
        DataError: malformed, UTF-16, or compressed too well.
    """
    size, most = 0, most_unpacked(path) if path.suffix.lower() == ".gz" else None
    with reading(path), _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            size += len(line) + 1
            if most is not None and size > most:
                raise bomb(path, most)
            text = _utf8(line, path)
            if text.strip():
                yield number, parse_line(path, number, text)


def _checked(path: Path, number: int, text: str) -> dict[str, Any]:
    """The row in a line that an earlier pass has checked: a third of the time."""
    try:
        return json.loads(text)
    except ValueError:  # the file has changed
        return parse_line(path, number, text)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    packed = path.suffix.lower() == ".gz"
    with open_input(path) as file, gzip.GzipFile(fileobj=file) if packed else nullcontext(file) as content:
        yield content  # type: ignore[misc]


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines without their line breaks, the first without a byte-order mark."""
    for number, line in enumerate(file):
        line = line.removesuffix(b"\n")
        yield line if number else line.removeprefix(_BOM_BYTES)


def _numbers(path: Path) -> array[int] | None:
    """The 1-based numbers of the lines with content."""
    found, size, most = array("q"), 0, most_unpacked(path)
    with _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            if number == 1 and line[:2] in _WIDE:
                return None
            size += len(line) + 1
            if size > most and path.suffix.lower() == ".gz":
                raise bomb(path, most)
            content = line.strip()
            if content and (content[0] in _PRINTABLE or _utf8(content, path).strip()):
                found.append(number)
    return found


def _utf8(line: bytes, path: Path) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        text_of(path)  # raises with the line of the whole file
        raise
