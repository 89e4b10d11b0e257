"""Reads one file by its extension. To add a format: a reader ``Path → FileRows`` and its row in ``READERS``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.data.readers.columnar import read_arrow, read_parquet
from halftune.data.readers.json_lines import read_json, read_json_lines
from halftune.data.readers.rows import FileRows, check_names, text_of


def read_file(path: Path) -> FileRows:
    """Read a file by its extension, a key of ``READERS``.

    Raises:
        DataError: malformed content (with the line) or not UTF-8.
    """
    return READERS[ending(path)](path)


def ending(path: Path) -> str:
    """The file extension, ``.gz`` removed."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


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
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": _lines_or_document,
    ".md": _document,
    ".rst": _document,
    ".py": _document,
}
