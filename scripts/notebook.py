"""Runs docs/tutorials/python.ipynb, cell by cell, and writes what it printed into it; no Jupyter is needed.

python scripts/notebook.py            in a temporary folder; half a minute on a CPU, offline
"""

from __future__ import annotations

import ast
import io
import json
import os
import runpy
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

VALUE = "_value_of_cell"
NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "tutorials" / "python.ipynb"


def run(notebook: dict[str, Any]) -> None:
    """Run the code cells in the working folder, and put their output into the notebook.

    Raises:
        Exception: of a cell.
    """
    names = dict[str, Any]()
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
    """Run a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name(VALUE, ast.Store())], tree.body[-1].value)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(ast.unparse(ast.fix_missing_locations(tree)))
        file.flush()
        names.update(runpy.run_path(file.name, init_globals=names, run_name="__main__"))
    return names.pop(VALUE, None)


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
