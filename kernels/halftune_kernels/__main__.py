"""Checks each operator against its reference on this machine, and caches the verdict.

    python -m halftune_kernels check
    python -m halftune_kernels check --operators gated_delta_rule kda

Leaves with 1 if an operator is wrong.
"""

from __future__ import annotations

import argparse
import sys

import torch

from halftune_kernels import selfcheck
from halftune_kernels.dispatch import OPERATORS, choose


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m halftune_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check",))
    parser.add_argument("--operators", nargs="+", default=OPERATORS, choices=OPERATORS)
    device, wrong = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0
    for operator in parser.parse_args(arguments).operators:
        backend = choose(operator, device, torch.bfloat16)
        found = selfcheck.verdict(operator, device, backend.name)
        wrong += not found.passed
        state = "right" if found.passed else "WRONG"
        why = f"{backend.name} ({backend.reason})"
        print(f"{operator}: {state}, {why}; {found.detail}; {found.seconds:.1f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
