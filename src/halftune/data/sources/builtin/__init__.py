"""Builtin data sets: text of Python's standard library, and questions about it; facts about number formats.

In: the name of a builtin set.
Out: `FileRows`.
Imported by: `data.sources`, `data.stream`, `verify`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from halftune.core.errors import DataError
from halftune.data.readers.rows import FileRows

QUESTIONS = Path(__file__).parent / "python_docs.jsonl"
FORMAT_VERSION = 1  # increase when the same Python version yields different text
DOCSTRING_BYTES, SOURCE_BYTES = 2_000_000, 1_000_000  # of text; enough for a short pre-training, quick to tokenise
MIN_DOCSTRING = 200
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "turtledemo",
    "__pycache__",
    "pydoc_data",
}


def builtin_fingerprint(name: str) -> str:
    """Return a key of a builtin set's content, without generating the content."""
    if name.startswith("python-"):
        return hashlib.sha256(QUESTIONS.read_bytes()).hexdigest() + ("" if name == "python-docs" else f" {name}")
    if (code := Path(__file__).parent / f"{name.removesuffix('-test')}.py").is_file():  # patterns, motions, tones
        return hashlib.sha256(code.read_bytes()).hexdigest() + f" {name}"
    if name.startswith("number-formats"):
        return hashlib.sha256(json.dumps(ROWS[name]()).encode()).hexdigest()
    return f"{name} v{FORMAT_VERSION} of Python {sys.version} in {sysconfig.get_paths()['stdlib']}"


def builtin_rows(name: str) -> FileRows:
    """Return the rows of a builtin set, a key of ``BUILTIN_DATA``.

    Raises:
        DataError: the standard-library sources are not installed.
    """
    rows = ROWS[name]()
    return FileRows(Path(f"builtin:{name}"), "row", list(range(1, len(rows) + 1)), list(rows))


def _python_docs() -> list[dict[str, str]]:
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def _python_pairs() -> list[dict[str, str]]:
    """Pairs: the right answer as chosen, the answer to another question as rejected."""
    rows = _python_docs()
    others = [rows[(index + len(rows) // 2) % len(rows)] for index in range(len(rows))]
    return [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": other["output"]}
        for row, other in zip(rows, others, strict=True)
    ]


def _python_rated() -> list[dict[str, Any]]:
    """The answers of ``python-pairs`` in turns: right ones rated good, those to other questions bad."""
    kinds = ("chosen", "rejected")
    return [
        {"prompt": row["prompt"], "completion": row[kinds[index % 2]], "label": not index % 2}
        for index, row in enumerate(_python_pairs())
    ]


@lru_cache(maxsize=1)
def _stdlib_text() -> list[dict[str, str]]:
    """Documents: docstrings of each module, then whole sources, up to fixed sizes.

    Files are ordered by path hash, so the size limit samples the whole library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts)]
    if not files:
        raise DataError(
            "this Python has no standard-library sources",
            where=str(library),
            remedy="use a text file instead",
            code="core.python_sources_missing",
        )
    files.sort(key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest())
    docstrings = (_docstrings(_read(path)) for path in files)
    documents = [*_up_to(DOCSTRING_BYTES, docstrings), *_up_to(SOURCE_BYTES, map(_read, files))]
    return [{"text": document} for document in documents]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _up_to(limit: int, documents: Iterator[str]) -> Iterator[str]:
    total = 0
    for document in documents:
        if len(document) < MIN_DOCSTRING:
            continue
        total += len(document)
        if total > limit:
            return
        yield document


def _docstrings(source: str) -> str:
    """All docstrings of a module, each prefixed with the name of its class or function."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the library ships some files with deliberate syntax errors
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append(text if isinstance(node, ast.Module) else f"{node.name}: {text}")
    return "\n\n".join(found)


def _number_formats(part: str) -> list[dict[str, str]]:
    from halftune.data.sources.builtin import number_formats

    return number_formats.text() if part == "text" else number_formats.questions(held_out=part == "test")


def _made(module: str, count: int, seed: int) -> Sequence[dict[str, Any]]:
    return import_module(f"halftune.data.sources.builtin.{module}").rows(count, seed)  # few runs have images or audio


ROWS: dict[str, Callable[[], Sequence[dict[str, Any]]]] = {
    "stdlib-text": _stdlib_text,
    "python-docs": _python_docs,
    "python-pairs": _python_pairs,
    "python-rated": _python_rated,
    "patterns": partial(_made, "patterns", 960, 0),
    "patterns-test": partial(_made, "patterns", 96, 1),
    "motions": partial(_made, "motions", 960, 0),
    "motions-test": partial(_made, "motions", 120, 1),
    "tones": partial(_made, "tones", 1080, 0),
    "tones-test": partial(_made, "tones", 108, 1),
    "number-formats": partial(_number_formats, "training"),
    "number-formats-test": partial(_number_formats, "test"),
    "number-formats-text": partial(_number_formats, "text"),
}
