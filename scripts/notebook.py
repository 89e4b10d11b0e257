"""Runs docs/tutorials/python.ipynb, cell by cell, and writes what it printed into it; no Jupyter is needed.

python scripts/notebook.py            in a temporary folder; two minutes on a CPU, offline
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "tutorials" / "python.ipynb"


def run(notebook: dict[str, Any]) -> None:
    """Run the code cells in the working folder, and put their output into the notebook.

    Raises:
        Exception: of a cell.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            value = _value("".join(cell["source"]), names)
        outputs = []
        if printed.getvalue():
            lines = printed.getvalue().splitlines(keepends=True)
            outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
        cell["execution_count"], cell["outputs"] = number, outputs


def _value(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def main() -> None:
    """Run it and write it."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(notebook)
        os.chdir(NOTEBOOK.parent)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
