"""The operators' own commands: prove them on this machine, compile them ahead, measure other cuts.

    python -m halftune_kernels check                                   each operator against its reference, kept on disk
    python -m halftune_kernels warm --operators gated_delta_rule --heads 16 32
                                                                       compiles what a run will start
    python -m halftune_kernels tune --operators kda --sizes 128        measures cuts, keeps the fastest that are right

Kernels are compiled for the numbers of heads and the head size: give those of the model.

Leaves with 1 if an operator is wrong, with 2 if there is nothing to do it on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import torch

from halftune_kernels import selfcheck, tuning
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.dispatch import OPERATORS, choose

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m halftune_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "warm", "tune"))
    parser.add_argument("--operators", nargs="+", default=OPERATORS, choices=OPERATORS)
    parser.add_argument("--sizes", nargs="+", type=int, help="warm, tune: head sizes (default: 128)")
    parser.add_argument(
        "--heads",
        nargs=2,
        type=int,
        metavar=("KEY", "VALUE"),
        help="warm, tune: heads of keys and of values (Mamba-2: groups and heads); the convolution is then that of q, "
        "k and v together (default: 2 4, of kda and rwkv7 2 2; as many channels as the head size)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="warm, tune (default: bfloat16)")
    asked = parser.parse_args(arguments)
    if asked.command == "check" and (asked.sizes or asked.heads or asked.dtypes):
        parser.error("check takes every dtype, and head sizes and heads of its own: --operators only")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if asked.command == "check":
            return _check(asked.operators, device)
        if device.type == "cpu":
            print(f"{asked.command}: no CUDA device here, and the CPU path has nothing to compile", file=sys.stderr)
            return 2
        for line in _each(asked, device):
            print(line, flush=True)
    except (ArgumentError, OSError) as error:
        print(f"{asked.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _check(operators: list[str], device: torch.device) -> int:
    wrong = 0
    for operator in operators:
        backend = choose(operator, device, torch.bfloat16)
        found = selfcheck.verdict(operator, device, backend.name)
        wrong += not found.passed
        state = "right" if found.passed else "WRONG"
        print(
            f"{operator}: {state}, {backend.name} ({backend.reason}); {found.detail}; {found.seconds:.1f} s", flush=True
        )
    return 1 if wrong else 0


def _each(asked: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """A line for each operator, dtype and head size, once it is warm or tuned."""
    heads = tuple(asked.heads) if asked.heads else None
    for operator in asked.operators:
        for name in asked.dtypes or ["bfloat16"]:
            backend = choose(operator, device, DTYPES[name])
            if backend.name != "triton":
                yield f"{operator} {name}: {backend.name} runs here ({backend.reason})"
                continue
            for size in asked.sizes or [128]:
                if asked.command == "warm":
                    tuning.prewarm(operator, device, DTYPES[name], size, heads)
                    yield f"{operator} {name} {size}: compiled"
                elif not tuning.tunable(operator):
                    yield f"{operator} {name}: has one cut for each GPU"
                else:
                    from triton.testing import do_bench

                    def measure(run: Callable[[], object]) -> float:
                        return float(do_bench(run))  # type: ignore[arg-type]

                    cuts = tuning.tune(operator, device, DTYPES[name], size, measure, heads=heads)
                    yield f"{operator} {name} {size}: {cuts}"


if __name__ == "__main__":
    sys.exit(main())
