"""Rows of large files, parsed again on each pass instead of held in memory."""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from halftune.core.files import open_input
from halftune.data import columnar, files
from halftune.data.files import FileRows

Rows = list[dict[str, Any]]
_BOM, _WIDE = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_PRINTABLE = range(0x21, 0x7F)


@dataclass(frozen=True)
class Streamed(Collection[dict[str, Any]]):
    """N rows; each pass reads the file.

    Attributes:
        count: N.
        again: starts a pass.
    """

    count: int
    again: Callable[[], Iterator[dict[str, Any]]] = field(repr=False)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.again()

    def __contains__(self, row: object) -> bool:
        return any(row == one for one in self)


def streamed_lines(path: Path) -> FileRows | None:
    """The rows of a JSON Lines file, plain or .gz; None for UTF-16, which is read whole.

    Only the line numbers of the rows are held. A malformed line raises in the pass that reaches it.

    Raises:
        DataError: not readable, or compressed too well.
    """
    with files.reading(path):
        numbers = _numbers(path)
    if numbers is None:
        return None

    checked = False

    def again() -> Iterator[dict[str, Any]]:
        nonlocal checked
        read = _checked if checked else files.parse_line
        with files.reading(path), _opened(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                text = _decoded(line, path)
                if text.strip():
                    yield read(path, number, text)
        checked = True

    return FileRows(path, "line", numbers, Streamed(len(numbers), again))


def line_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """1-based line numbers and rows of a JSON Lines file, plain or .gz, in one pass.

    Raises:
        DataError: malformed, UTF-16, or compressed too well.
    """
    size, most = 0, files.most_unpacked(path) if path.suffix.lower() == ".gz" else None
    with files.reading(path), _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            size += len(line) + 1
            if most is not None and size > most:
                raise files.bomb(path, most)
            text = _decoded(line, path)
            if text.strip():
                yield number, files.parse_line(path, number, text)


def _checked(path: Path, number: int, text: str) -> dict[str, Any]:
    """The row in a line that an earlier pass has checked: a third of the time."""
    try:
        return json.loads(text)
    except ValueError:  # the file has changed
        return files.parse_line(path, number, text)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    packed = path.suffix.lower() == ".gz"
    with open_input(path) as file, gzip.GzipFile(fileobj=file) if packed else nullcontext(file) as content:
        yield content  # type: ignore[misc]


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines without their line breaks, the first without a byte-order mark."""
    for number, line in enumerate(file):
        line = line.removesuffix(b"\n")
        yield line if number else line.removeprefix(_BOM)


def _numbers(path: Path) -> array[int] | None:
    """The 1-based numbers of the lines with content."""
    found, size, most = array("q"), 0, files.most_unpacked(path)
    with _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            if number == 1 and line[:2] in _WIDE:
                return None
            size += len(line) + 1
            if size > most and path.suffix.lower() == ".gz":
                raise files.bomb(path, most)
            content = line.strip()
            if content and (content[0] in _PRINTABLE or _decoded(content, path).strip()):
                found.append(number)
    return found


def _decoded(line: bytes, path: Path) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        files.text_of(path)  # raises with the line of the whole file
        raise


def streamed_batches(path: Path, count: int, batches: Callable[[], Iterator[Rows]]) -> FileRows:
    """The rows of a columnar file; a pass over them fills ``notes``.

    Args:
        path: the file.
        count: its rows.
        batches: starts a pass over batches of rows, as ``to_pylist`` makes them.
    """
    notes: dict[int, str] = {}

    def again() -> Iterator[dict[str, Any]]:
        start = 0
        for rows in batches():
            cleaned = columnar.arrow_rows(path, rows)
            notes.update({start + index: note for index, note in cleaned.notes.items()})
            start += len(rows)
            yield from cleaned.rows

    return FileRows(path, "row", range(1, count + 1), Streamed(count, again), notes)
