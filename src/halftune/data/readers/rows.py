"""Rows of one file: in memory or parsed again on each pass; the limits and errors that all readers share."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.core.files import open_input

AGAIN = "corrupt file or wrong extension; download it again"
LARGE = 1 << 24  # bytes of JSON Lines, Parquet or Arrow content from which rows are not held in memory
# largest accepted decompression ratio; size in bytes that is always accepted
_RATIO, _SMALL = 100, 1 << 26


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


def text_of(path: Path) -> str:
    """The file's text: UTF-8 with or without a byte-order mark, or UTF-16 with one."""
    with reading(path):
        if path.suffix.lower() == ".gz":
            raw = _unpacked(path)
        else:
            with open_input(path) as file:
                raw = file.read()
    return decoded(raw, path)


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


def decoded(raw: bytes, path: Path) -> str:
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


def check_names(names: Sequence[str], where: str) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"duplicate column names: {', '.join(map(repr, twice))}",
            where=where,
            remedy="rename or remove the duplicates",
            code="data.duplicate_columns",
        )
