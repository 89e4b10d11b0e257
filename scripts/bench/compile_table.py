"""Compiles every operator's kernels for every GPU, without one, and writes the table of docs/kernels.md.

    python scripts/bench/compile_table.py                                  # everything: half an hour of processor time
    python scripts/bench/compile_table.py --operators ssd --gpus 90 --sizes 128 --dtypes bfloat16
    python scripts/bench/compile_table.py --write                          # also into docs/kernels.md

Rows that were asked for replace the same rows of the table; others stay. Triton keeps what it compiled on disk, so that
unchanged kernels cost nothing the second time. Leaves with 1 if a kernel does not fit.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
import triton

from halftune_kernels.cases import case
from halftune_kernels.compile_check import Compiled, compile_case
from halftune_kernels.dispatch import expected
from halftune_kernels.gate import SHARED_MEMORY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- compile table: scripts/bench/compile_table.py -->", "<!-- end of the compile table -->"
OPERATORS = ("gated_delta_rule", "ssd", "causal_conv1d", "gated_rms_norm")
HEAD = "| operator | dtype | head size | GPU | kernel | shared memory, bytes (of) | registers | spilled bytes |\n"
HEAD += "|---|---|---|---|---|---|---|---|\n"


def row(operator: str, dtype: str, size: int, kernel: Compiled) -> str:
    shared = f"{kernel.shared:,} ({kernel.limit:,})" + ("" if kernel.fits else " **does not fit**")
    gpu, name = f"sm_{kernel.capability}", kernel.kernel
    return f"| {operator} | {dtype} | {size} | {gpu} | {name} | {shared} | {kernel.registers} | {kernel.spills} |"


def key(line: str) -> str:
    return "|".join(line.split("|")[1:6])


def write(lines: list[str]) -> None:
    """Puts the rows into the page, in place of rows of the same operator, dtype, size, GPU and kernel."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = {key(line): line for line in table.splitlines() if re.match(r"\| \w+ \| \w+\d+ \|", line)}
    rows |= {key(line): line for line in lines}
    PAGE.write_text(f"{before}{BEGIN}\n\n{HEAD}" + "\n".join(sorted(rows.values())) + f"\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=OPERATORS, choices=OPERATORS)
    parser.add_argument("--gpus", nargs="+", type=int, default=sorted(SHARED_MEMORY), choices=sorted(SHARED_MEMORY))
    parser.add_argument("--sizes", nargs="+", type=int, default=(64, 96, 128, 256))
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16", "float16", "float32"))
    parser.add_argument("--write", action="store_true", help="put the rows into docs/kernels.md")
    asked = parser.parse_args()
    lines, fits = [], True
    for operator in asked.operators:
        for name in asked.dtypes:
            dtype = getattr(torch, name)
            for size in asked.sizes:
                for gpu in asked.gpus:
                    version = tuple(int(part) for part in triton.__version__.split(".")[:3])
                    backend = expected(operator, gpu, version, dtype)
                    if backend.name != "triton":
                        print(f"{operator} {name} {size} sm_{gpu}: {backend.reason}", flush=True)
                        continue
                    for kernel in compile_case(case(operator, size, (0, 80)), dtype, gpu):
                        fits &= kernel.fits
                        lines.append(row(operator, name, size, kernel))
                        print(lines[-1], flush=True)
                    if asked.write:
                        write(lines)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
