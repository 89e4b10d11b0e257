"""The builtin data sets: plain text of this Python's standard library, and questions on it."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from halftune.core.errors import DataError
from halftune.data.files import FileRows

QUESTIONS = Path(__file__).parent / "python_docs.jsonl"
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


def builtin_rows(name: str) -> FileRows:
    """Rows of a builtin set, a key of ``BUILTIN_DATA``.

    Raises:
        DataError: this Python comes without its library's sources.
    """
    rows = _stdlib_text() if name == "stdlib-text" else _python_docs()
    return FileRows(Path(f"builtin:{name}"), "row", list(range(1, len(rows) + 1)), list(rows))


def _python_docs() -> list[dict[str, str]]:
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


@lru_cache(maxsize=1)
def _stdlib_text() -> list[dict[str, str]]:
    """Documents: of each module its docstrings, then whole sources, in the order of the paths, up to fixed sizes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if not SKIPPED & set(path.relative_to(library).parts)]
    if not files:
        raise DataError(
            "this Python comes without the sources of its library",
            where=str(library),
            remedy="give a text file instead",
        )
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    documents = [*_up_to(DOCSTRING_BYTES, map(_docstrings, sources)), *_up_to(SOURCE_BYTES, iter(sources))]
    return [{"text": document} for document in documents]


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
    """All docstrings of a module, each under the name of what it documents."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the library ships some files that are wrong on purpose
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append(text if isinstance(node, ast.Module) else f"{node.name}: {text}")
    return "\n\n".join(found)
