"""The builtin data sets: plain text of this Python's standard library, and questions on it."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from halftune.core.errors import DataError
from halftune.data.files import FileRows

QUESTIONS = Path(__file__).parent / "python_docs.jsonl"
FORMAT_VERSION = 1  # raise it when the same Python would give another text
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
    """Identifies a builtin set's content without making it."""
    if name == "python-docs":
        return hashlib.sha256(QUESTIONS.read_bytes()).hexdigest()
    return f"{name} v{FORMAT_VERSION} of Python {sys.version} in {sysconfig.get_paths()['stdlib']}"


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
    """Documents: of each module its docstrings, then whole sources, up to fixed sizes.

    The order is that of the paths' hashes, so that what is within the size comes from the whole library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts)]
    if not files:
        raise DataError(
            "this Python comes without the sources of its library",
            where=str(library),
            remedy="give a text file instead",
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
