"""Compiles the kernels of every model's layers for GPUs that are not here, at real widths, and prints their table.

    nice python scripts/bench/compile_dense.py        # about three minutes of one core

A cell is shared memory in KiB, registers per thread and bytes per thread that spill. The table of
docs/measurements/kernels.md is what it printed; ``compile_table.py`` holds the other operators.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))

import torch
from compile_check import compile_case

from halftune_kernels.cases import case
from halftune_kernels.ops.adapted_activation import most_ranks

GPUS = (80, 89, 90, 100, 120)
LOOPS = ("rms_norm", "gated_rms_norm", "adapted_activation")  # over tiles, with enough rows; need more registers
# operator, size of its case, heads of keys and queries, what it stands for
WIDTHS: tuple[tuple[str, int, tuple[int, int] | None, str], ...] = (
    ("rms_norm", 128, None, "128"),
    ("rms_norm", 3584, None, "3,584"),
    ("rms_norm", 8192, None, "8,192"),
    ("gated_rms_norm", 128, None, "128"),
    ("gated_rms_norm", 8192, None, "8,192"),
    ("gated_activation", 1024, None, "from 1,024"),
    ("adapted_activation", 1024, (16, 16), "rank 16"),
    ("adapted_activation", 1024, (32, 32), "rank 32"),
    ("adapted_activation", 1024, (64, 64), "rank 64"),
    ("rope", 64, (4, 28), "28 and 4 heads of 64"),
    ("rope", 128, (4, 28), "28 and 4 heads of 128"),
    ("linear_cross_entropy", 1024, None, "vocabularies from 4,096"),
    ("float8_rows", 8192, None, "from 4,096"),
)


def main() -> int:
    rows: dict[tuple[str, ...], list[str]] = {}
    spilled = 0
    for gpu in GPUS:
        for operator, size, heads, width in WIDTHS:
            for dtype in (torch.bfloat16, torch.float32):
                if operator == "adapted_activation" and heads and heads[0] > most_ranks(dtype):
                    continue  # layers of such ranks have separate products
                if operator == "float8_rows" and gpu < 89:
                    rows.setdefault((operator, width, str(dtype).removeprefix("torch."), "`quantise_row`"), []).append(
                        "-"
                    )
                    continue
                made = case(operator, size, (0, 8192 if operator in LOOPS else 80), heads=heads)
                for number, kernel in enumerate(compile_case(made, dtype, gpu)):
                    name = f"`{kernel.kernel}`" + (", back" if operator == "rope" and number else "")
                    cells = rows.setdefault((operator, width, str(dtype).removeprefix("torch."), name), [])
                    cells.append(f"{kernel.shared / 1024:.0f} / {kernel.registers} / {kernel.spills}")
                    spilled += kernel.spills > 0 or not kernel.fits
    print("| operator | width | dtype | kernel | " + " | ".join(f"sm_{gpu}" for gpu in GPUS) + " |")
    print("|---|---|---|---|" + "---|" * len(GPUS))
    for key, cells in rows.items():
        print("| " + " | ".join([*key, *cells]) + " |")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
