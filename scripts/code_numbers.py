"""Print the numbers of the code base: lines, circles, files, complexity, duplicates, additions, start-up, call chain.

python scripts/code_numbers.py             all of them; the two-step runs take twenty CPU-seconds
python scripts/code_numbers.py --static    without the runs

Start-up and calls are counted up to the first forward pass of training, in a run that prepares its data and in one that
finds it prepared.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from networkx import DiGraph, strongly_connected_components

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ("src", "kernels", "webui")
COMPLEX = 10  # cyclomatic complexity above which a function counts
BLOCK = 6  # code lines that are the same in two places
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

# Trains two steps; prints the CPU-seconds until the first forward pass of training, and halftune's frames above it.
RUN = """
import json, sys, time
from traceback import walk_stack
from torch import is_grad_enabled
from torch.nn.modules.module import register_module_forward_pre_hook
from halftune.cli import train_main

found = {}

def look(module, _):
    if not found and module.training and is_grad_enabled() and type(module).__name__.endswith("ForCausalLM"):
        names = [f"{frame.f_globals.get('__name__')}:{frame.f_code.co_name}" for frame, _ in walk_stack(None)]
        chain = [name for name in names[::-1] if name.startswith("halftune")]
        found.update(seconds=time.process_time(), chain=chain)

register_module_forward_pre_hook(look)
if code := train_main():
    sys.exit(code)
print(json.dumps(found))
"""
RECIPE = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": "builtin:python-docs", "max_length": 64},
    "training": {"output_dir": "run", "max_steps": 2},
}


def files(*folders: str) -> list[Path]:
    """The Python files below folders of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def code_lines(path: Path) -> list[tuple[int, str]]:
    """(line number, stripped line) of every line that is not blank, a comment or a docstring."""
    text, strings = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return [(number, lines[number - 1].strip()) for number in sorted(code - strings)]


def lines_per_package() -> dict[str, int]:
    """Code lines of each package of halftune, of the other roots, of scripts and of tests."""
    counted: Counter[str] = Counter()
    for path in files(*ROOTS, "scripts", "tests"):
        parts = path.relative_to(ROOT).parts
        name = f"halftune.{Path(parts[2]).stem}" if parts[0] == "src" else parts[0]
        counted[name] += len(code_lines(path))
    return dict(sorted(counted.items()))


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity as radon counts it: also comprehensions, assertions and each ``and`` and ``or``."""
    nodes = list(ast.walk(function))
    words = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    loops = sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + words + loops + sum(isinstance(node, BRANCHES) for node in nodes)


def functions_too_complex() -> tuple[int, int]:
    """How many functions exceed the limit, and how many there are."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for path in files(*ROOTS) for node in ast.walk(ast.parse(path.read_text())))
    found = [complexity(node) for node in nodes if isinstance(node, kinds)]
    return sum(one > COMPLEX for one in found), len(found)


def duplicates() -> list[str]:
    """Pairs of places with the same six or more code lines; imports do not count."""
    places: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for path in files(*ROOTS):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        imports = {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        code = [(at, line) for at, line in code_lines(path) if at not in imports]
        for index in range(len(code) - BLOCK + 1):
            block = tuple(line for _, line in code[index : index + BLOCK])
            if sum(len(line) > BLOCK for line in block) > BLOCK // 2:  # not only brackets
                places[block].append((str(path.relative_to(ROOT)), index, code[index][0]))
    starts = {(one, other) for found in places.values() for one, other in combinations(found, 2)}
    seen = {(a[:2], b[:2]) for a, b in starts}
    first = [(a, b) for a, b in starts if ((a[0], a[1] - 1), (b[0], b[1] - 1)) not in seen]  # where a run begins
    return sorted(f"{a[0]}:{a[2]} ~ {b[0]}:{b[2]}" for a, b in first)


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle, at the top of a file or inside a function."""
    return [sorted(group) for group in strongly_connected_components(DiGraph(arrows)) if len(group) > 1]


def two_steps() -> tuple[dict[str, Any], ...]:
    """``seconds`` of CPU time and ``chain`` of calls from the CLI to the first forward pass of training.

    Returns:
        of a run that prepares its data, and of one that finds it prepared.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.yaml").write_text(json.dumps(RECIPE))  # JSON is YAML
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HALFTUNE_CACHE": f"{folder}/cache"}
        command = [sys.executable, "-c", RUN, "--config", "recipe.yaml"]
        words = ([*command, f"training.output_dir=run{number}"] for number in range(2))
        options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "check": True}
        return tuple(json.loads(subprocess.run(one, **options).stdout.splitlines()[-1]) for one in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="without the two-step run")
    static = parser.parse_args().static
    lines, (over, functions), twice = lines_per_package(), functions_too_complex(), duplicates()
    product = sum(count for name, count in lines.items() if name not in ("scripts", "tests"))
    print("\n".join(f"{name:24}{count:8,} code lines" for name, count in lines.items()))
    print(f"{'src + kernels + webui':24}{product:8,} code lines")
    print(f"complexity over {COMPLEX}: {over} of {functions} functions ({over / functions:.1%})")
    print(f"duplicates of {BLOCK} lines: {len(twice)}", *twice, sep="\n  ")
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "end_to_end")]
    from additions import ADDITIONS
    from test_floors import arrows

    print(f"circles of imports: {len(circles(arrows()))}", *circles(arrows()), sep="\n  ")
    most = Counter(path.parent.relative_to(ROOT) for path in files(*ROOTS))
    print(f"files per folder: {sum(most.values()) / len(most):.1f}, most", most.most_common(3)[0][1])
    print(*(f"{count:4} {folder}" for folder, count in most.most_common(8)), sep="\n")
    print("\n".join(f"files for a new {one.what}: {len(one.files)}" for one in ADDITIONS))
    if not static:
        anew, found = two_steps()
        print(f"start-up: {found['seconds']:.2f} CPU-seconds, {anew['seconds']:.2f} where it prepares its data")
        print(f"calls from the CLI to the forward pass: {len(found['chain'])}", *found["chain"], sep="\n  ")


if __name__ == "__main__":
    main()
