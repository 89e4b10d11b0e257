"""Measures other cuts of the Triton kernels on the CUDA device and prints what to write into ``CONFIGS`` of triton.py.

    python scripts/tune_kernels.py --operators kda --sizes 128 --heads 32 32

A cut is printed, as soon as it is found, if the step is at least 2 % faster than with the best one before and the
operator still computes and learns right. Pipelined cuts are tried first. Kernels are compiled for the numbers of heads
and the head size: give those of a model. Leaves with 2 without a device.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from halftune_kernels import cases, selfcheck
from halftune_kernels.launch import Config, capability, power_of_two
from halftune_kernels.scan.cuts import default, on_trial

OPERATORS = ("gated_delta_rule", "kda", "rwkv7", "ssd")  # those with a table
BOUNDS = (0, 8192)  # of the packed row that is timed
GAIN = 0.98
Measure = Callable[[Callable[[], object]], float]


def tune(
    operator: str,
    device: torch.device,
    dtype: torch.dtype,
    made: cases.Case,
    size: int,
    measure: Measure,
    only: Collection[str] = (),
) -> dict[str, Config]:
    """The fastest right cut of every kernel of ``operator``, or of ``only`` those named; each better one is printed.

    ``measure`` runs its argument and returns milliseconds.
    """
    shipped, half = importlib.import_module(f"halftune_kernels.ops.{operator}.triton").CONFIGS, dtype != torch.float32
    gpu, padded = capability(device), power_of_two(size)
    kept = {name: default(shipped, name, gpu, dtype, padded) for name, of_half in shipped if of_half == half}
    step = step_of(made, dtype, device)

    def milliseconds(cuts: dict[str, Config]) -> float:
        with on_trial(operator, cuts):
            try:
                return measure(step)
            except selfcheck.failures():  # too much shared memory for this GPU
                return float("inf")

    best = milliseconds(kept)
    print(f"{operator} {size}: {best:.3f} ms as shipped", flush=True)
    for kernel in only or list(kept):
        for other in neighbours(kept[kernel]):
            cuts = kept | {kernel: other}
            if (time := milliseconds(cuts)) < best * GAIN and is_right(operator, device, dtype, size, cuts):
                best, kept[kernel] = time, other
                print(f"{operator} {size} {kernel}: {other}, {best:.3f} ms", flush=True)
    return kept


def is_right(operator: str, device: torch.device, dtype: torch.dtype, size: int, cuts: dict[str, Config]) -> bool:
    """Whether outputs and gradients in ``dtype`` are within the self-check's bounds."""
    with on_trial(operator, cuts):
        return selfcheck.check(operator, device, "triton", (size,), (dtype,)).passed


def step_of(made: cases.Case, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Forward and backward pass as in training, and nothing else: inputs are made and moved before."""
    inputs = {name: x for name, x in made.inputs.items() if name not in ("initial_state", "initial_states")}
    options = {name: x for name, x in made.options.items() if name != "output_final_state"}
    given, run = replace(made, inputs=inputs, options=options).bind(dtype, device, "triton")

    def step() -> object:
        outputs = run()
        return torch.autograd.grad(outputs, list(given.values()), [torch.ones_like(x) for x in outputs])

    return step


def neighbours(cut: Config) -> list[Config]:
    """What is tried in place of ``cut``."""
    tried = itertools.product((2, 3, 1), (4, 8, 2), (32, 16, 64) if cut.width else (cut.width,))
    made = [replace(cut, width=width, warps=warps, stages=stages) for stages, warps, width in tried]
    return [one for one in made if one != cut]


def main() -> int:
    """Prints a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=OPERATORS, choices=OPERATORS)
    parser.add_argument("--kernels", nargs="+", default=(), help="such as scan_forward; default: all with a table")
    parser.add_argument("--sizes", nargs="+", type=int, default=[128], help="head sizes")
    parser.add_argument("--heads", nargs=2, type=int, metavar=("KEY", "VALUE"), help="of keys and of values")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    from triton.testing import do_bench

    device, heads = torch.device("cuda"), tuple(asked.heads) if asked.heads else None
    for operator, name, size in itertools.product(asked.operators, asked.dtypes, asked.sizes):
        made = cases.case(operator, size, BOUNDS, heads=heads)
        dtype = getattr(torch, name)
        tune(operator, device, dtype, made, size, lambda run: float(do_bench(run)), asked.kernels)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
