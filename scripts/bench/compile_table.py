"""Compiles the kernels of linear attention for every GPU, without one: the table of docs/measurements/kernels.md.

    nice python scripts/bench/compile_table.py                   # all of it: an hour or two of one core the first time
    python scripts/bench/compile_table.py --operators ssd --gpus 90 --sizes 128 --dtypes bfloat16
    python scripts/bench/compile_table.py --minutes 10 --write   # what is done in that time; the next call goes on
    python scripts/bench/compile_table.py --minutes 0 --write    # the page from what is kept, compiling nothing

sm_89 gets what sm_86 gets (Triton knows no difference between the two, the assembler allots the same): it is compiled
at one head size, as a sample, and a difference there is printed. float16 is as bfloat16 but for the states, which are
kept in fp32: it is compiled at two head sizes, the usual and the largest.

What a kernel needs is kept on disk under its source, what starts it, Triton's version and its cut on that GPU: a call
resumes where the last one was stopped, and another kernel or another cut (``CONFIGS``) is compiled again, on the GPUs
and at the head sizes that have it, and nothing else. The page gets all that is kept, says how much of it is out of
date, and names the largest spills first. Leaves with 1 if a kernel does not fit.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))

import torch
import triton
from compile_check import TENSOR_MEMORY, Compiled, compile_case

import halftune_kernels
from halftune_kernels.cases import case
from halftune_kernels.dispatch import OPERATORS, expected, has_triton
from halftune_kernels.gate import DENSE, SHARED_MEMORY
from halftune_kernels.launch import power_of_two
from halftune_kernels.scan.cuts import default
from halftune_kernels.selfcheck import cache_dir

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "kernels.md"
BEGIN, END = "<!-- compile table: scripts/bench/compile_table.py -->", "<!-- end of the compile table -->"
DTYPES = ("bfloat16", "float32", "float16")
SIZES = (128, 64, 256, 96, 16)  # in the order of their use
SAMPLED = {"sm_89": (128,), "float16": (128, 256)}  # head sizes at which these are compiled; see above


class Combination(NamedTuple):
    """One operator on one GPU."""

    operator: str
    dtype: str
    size: int
    gpu: int

    @property
    def key(self) -> str:
        return f"{self.operator}-{self.dtype}-{self.size}-sm{self.gpu}"


def _package() -> Path:
    return Path(halftune_kernels.__file__ or next(iter(halftune_kernels.__path__))).parent


@functools.cache  # of the sources at hand when this process began, as are the kernels
def fingerprint(operator: str, kernel: str) -> str:
    """Of what a compiled kernel depends on but for its cut: what starts it, itself and all that it calls, without
    comments."""
    own, scan = _package() / "ops" / operator, _package() / "scan"
    hosts, kernels = [own / "triton.py", _package() / "launch.py"], []
    if (own / "kernels.py").exists():  # a chunked recurrence; the others' kernels stand beside what starts them
        hosts.append(scan / "chunk_launch.py")
        kernels = [own / "kernels.py", scan / "delta_kernels.py", scan / "chunk_kernels.py"]
    parts = [triton.__version__, *(without_cuts(file.read_text()) for file in hosts)]
    parts += closure(kernel, *(file.read_text() for file in kernels))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def without_cuts(source: str) -> str:
    """A module but for its tables of cuts and its imports."""
    tree = ast.parse(source)
    tree.body = [one for one in tree.body if not isinstance(one, ast.Import | ast.ImportFrom) and not _is_table(one)]
    return ast.dump(tree)


def _is_table(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.AnnAssign) and "Rows" in ast.unparse(statement.annotation)


def closure(name: str, *sources: str) -> list[str]:
    """The functions, classes and constants of ``sources`` that ``name`` is made of."""
    known: dict[str, ast.stmt] = {}
    for statement in itertools.chain.from_iterable(ast.parse(source).body for source in sources):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            known.setdefault(statement.name, statement)
        elif isinstance(statement, ast.Assign):
            known.setdefault(ast.unparse(statement.targets[0]), statement)
    found, waiting = {}, [name]
    while waiting:
        one = waiting.pop()
        if one in known and one not in found:
            found[one] = ast.dump(known[one])
            waiting += [node.id for node in ast.walk(known[one]) if isinstance(node, ast.Name)]
    return [found[one] for one in sorted(found)]


def cuts(one: Combination) -> dict[str, list[int]]:
    """The shipped cut of each kernel that has one in a table; the others' are in the source."""
    shipped = getattr(importlib.import_module(f"halftune_kernels.ops.{one.operator}.triton"), "CONFIGS", {})
    dtype, padded = getattr(torch, one.dtype), power_of_two(one.size)
    return {
        kernel: list(astuple(default(shipped, kernel, one.gpu, dtype, padded)))
        for kernel, half in shipped
        if half == (dtype != torch.float32)
    }


class Kept:
    """Results on disk, one file for each combination."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, one: Combination) -> tuple[list[Compiled], set[str]] | None:
        """Its kernels, and the names of those that are out of date; None if it was not compiled."""
        try:
            stored = json.loads((self._folder / f"{one.key}.json").read_text())
            kernels = [Compiled(**kernel) for kernel in stored["kernels"]]
            now, then = self._of(one, kernels), stored["of"]
            stale = {name for name, of in now.items() if then.get(name) != of}
            return kernels, stale
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, torn, or of another version
            return None

    def put(self, one: Combination, kernels: list[Compiled]) -> None:
        """All kernels of ``one``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = {"of": self._of(one, kernels), "kernels": [asdict(kernel) for kernel in kernels]}
        part = self._folder / f"{one.key}.{os.getpid()}.part"  # of two calls at once, each has its own
        part.write_text(json.dumps(stored))
        part.replace(self._folder / f"{one.key}.json")

    @staticmethod
    def _of(one: Combination, kernels: list[Compiled]) -> dict[str, list[object]]:
        cut, names = cuts(one), [kernel.kernel for kernel in kernels]
        return {name: [fingerprint(one.operator, name), cut.get(name)] for name in names}


def combinations(
    operators: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int], gpus: Iterable[int]
) -> Iterator[Combination]:
    """Those that Triton runs, the others go to torch; of what is much like another, a sample."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:3])
    for dtype, size, operator, gpu in itertools.product(dtypes, sizes, operators, gpus):
        runs = expected(operator, gpu, version, getattr(torch, dtype)).name == "triton"
        # sm_75 has float16, and no bfloat16 that would stand for it
        sampled = all(size in SAMPLED.get(name, (size,)) for name in (f"sm_{gpu}", dtype)) or gpu == 75
        if runs and sampled:
            yield Combination(operator, dtype, size, gpu)


def differences(found: dict[Combination, list[Compiled]]) -> Iterator[str]:
    """Where sm_89 is not as sm_86."""
    for one, kernels in found.items():
        other = found.get(one._replace(gpu=86)) if one.gpu == 89 else None
        for mine, its in zip(kernels, other, strict=True) if other else ():
            if (mine.shared, mine.registers, mine.spills) != (its.shared, its.registers, its.spills):
                numbers = f"{mine.shared:,} / {mine.registers} / {mine.spills}"
                yield f"{one.key}: {mine.kernel} {numbers}, not {its.shared:,} / {its.registers} / {its.spills}"


def compiled(one: Combination, only: Collection[str] = ()) -> list[Compiled]:
    """What its kernels need, now; ``only`` those named, or all."""
    return compile_case(case(one.operator, one.size, (0, 80)), getattr(torch, one.dtype), one.gpu, only)


def named(some: Iterable[Combination]) -> str:
    """Combinations in words, those that differ in the GPU only together."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    for one in some:
        groups.setdefault(one[:3], []).append(f"sm_{one.gpu}")
    return "; ".join(
        f"{name}, {dtype}, head size {size} ({', '.join(on)})" for (name, dtype, size), on in groups.items()
    )


def largest(found: dict[Combination, list[Compiled]]) -> str:
    """For each operator and dtype: how many of its kernels spill, and where most."""
    lines = [
        "| operator | dtype | kernels | with spills | most, bytes per thread | in |",
        "|---|---|---:|---:|---:|---|",
    ]
    for operator, dtype in itertools.product(OPERATORS, DTYPES):
        mine = [(one, kernel) for one, kernels in found.items() for kernel in kernels if one[:2] == (operator, dtype)]
        if mine:
            spilled = sum(kernel.spills > 0 for _, kernel in mine)
            one, worst = max(mine, key=lambda pair: pair[1].spills)
            where = f"`{worst.kernel}`, head size {one.size}, sm_{one.gpu}" if spilled else ""
            lines.append(f"| {operator} | {dtype} | {len(mine)} | {spilled} | {worst.spills} | {where} |")
    return "\n".join(lines)


def tables(found: dict[Combination, list[Compiled]]) -> str:
    """One table for each operator and dtype: a row for each head size, kernel and cut, a column for each GPU."""
    gpus, lines = sorted({one.gpu for one in found}), []
    for operator, dtype in itertools.product(OPERATORS, DTYPES):
        rows: dict[tuple[int, str, str], dict[int, str]] = {}
        for one, kernels in found.items():
            if (one.operator, one.dtype) == (operator, dtype):
                for kernel in kernels:
                    cell = f"{kernel.shared / 1024:.0f} / {kernel.registers} / {kernel.spills}"
                    cell += "" if kernel.fits else " **does not fit**"
                    rows.setdefault((one.size, kernel.kernel, kernel.cut), {})[one.gpu] = cell
        if rows:
            lines += [f"**{operator}, {dtype}**", ""]
            lines += ["| head size | kernel | tiles | " + " | ".join(f"sm_{gpu}" for gpu in gpus) + " |"]
            lines += ["|---|---|---|" + "---|" * len(gpus)]
            for (size, kernel, cut), cells in sorted(rows.items()):
                row = [str(size), kernel, cut, *(cells.get(gpu, "") for gpu in gpus)]
                lines.append("| " + " | ".join(row) + " |")
            lines.append("")
    return "\n".join(lines)


def write(page: Path, table: str) -> None:
    """Puts the table between the page's marks."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}")


def main(arguments: list[str] | None = None) -> int:
    with_kernels = [operator for operator in OPERATORS if has_triton(operator) and operator not in DENSE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=with_kernels, choices=with_kernels)
    parser.add_argument("--gpus", nargs="+", type=int, default=sorted(SHARED_MEMORY), choices=sorted(SHARED_MEMORY))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no compilation after so long")
    parser.add_argument("--write", action="store_true", help="put all that is kept into docs/measurements/kernels.md")
    asked = parser.parse_args(arguments)
    kept, fits, missing = Kept(cache_dir() / "compiled"), True, 0
    start = time.monotonic()
    for one in combinations(asked.operators, asked.dtypes, asked.sizes, asked.gpus):
        kernels, stale = kept.get(one) or ([], set())
        if stale or not kernels:
            if time.monotonic() - start >= asked.minutes * 60:
                missing += 1
                continue
            kernels = [kernel for kernel in kernels if kernel.kernel not in stale] + compiled(one, stale)
            kernels.sort(key=lambda kernel: kernel.kernel)
            kept.put(one, kernels)
            spills = {kernel.kernel: kernel.spills for kernel in kernels if kernel.spills}
            print(f"{one.key}: spills {spills or 'none'}", flush=True)
        for kernel in kernels:
            if not kernel.fits:
                fits = False
                needs = f"{kernel.shared:,} bytes of {kernel.limit:,}"
                if kernel.tensor_memory > TENSOR_MEMORY:
                    needs = f"{kernel.tensor_memory} columns of tensor memory of {TENSOR_MEMORY}"
                print(f"{one.key}: {kernel.kernel} needs {needs}", flush=True)
    print(f"{missing} combinations are not compiled yet")
    if asked.write:
        everything = list(combinations(with_kernels, DTYPES, sorted(SIZES), sorted(SHARED_MEMORY)))
        known = {one: got for one in everything if (got := kept.get(one)) is not None}
        found = {one: kernels for one, (kernels, _) in known.items()}
        older = [one for one, (_, stale) in known.items() if stale]
        print("\n".join(differences(found)) or "sm_89 is as sm_86")
        fresh = [one for one in known if one not in older]
        share = f"{len(fresh)} of {len(everything)} combinations of operator, dtype, head size and GPU are compiled."
        if older and len(older) <= len(fresh):
            share += f" Compiled from older kernels or tile sizes: {named(older)}."
        elif older:
            share += f" The {len(older)} others here are from older kernels or tile sizes. New are: {named(fresh)}."
        write(PAGE, f"{share}\n\n{largest(found)}\n\n{tables(found)}")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
