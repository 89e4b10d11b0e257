"""Every Triton operator at real head sizes through the interpreter, forward and backward: minutes, so no test.

python tests/kernels/interpreted_sizes.py --sizes 64 96 128 256 --dtypes bfloat16 float16
"""

from __future__ import annotations

import argparse
import sys

import pytest
import torch
from interpreter import interpreting
from operator_checks import CPU, poison_empty

from halftune_kernels.cases import case, rounded
from halftune_kernels.dispatch import OPERATORS
from halftune_kernels.selfcheck import bound, relative_error

ROWS = (0, 1, 1, 66)  # one row, none, a chunk of 64 and a row of the next


def worst(operator: str, size: int, dtype: torch.dtype) -> tuple[float, str]:
    """The largest error of outputs and gradients, as a share of its bound, and of which."""
    made = rounded(case(operator, size, ROWS, seed=size), dtype)
    truth = made.call(torch.float64, CPU, "reference")
    with pytest.MonkeyPatch.context() as patch, interpreting():
        poison_empty(patch)
        found = made.call(dtype, CPU, "triton")
    return max((relative_error(value, truth[name]) / bound(name, dtype), name) for name, value in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=OPERATORS, choices=OPERATORS)
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 96, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    asked, wrong = parser.parse_args(), 0
    for name in asked.dtypes:
        for size in asked.sizes:
            for operator in asked.operators:
                dtype = getattr(torch, name)
                error, what = worst(operator, size, dtype)
                wrong += not error <= 1
                print(f"{operator} {size} {name}: {what} {error:.2f} of its bound", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
