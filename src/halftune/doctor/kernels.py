"""Compares each operator with its reference on this machine, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halftune.doctor.environment import Check
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.dispatch import OPERATORS, choose
from halftune_kernels.selfcheck import verdict


def check_kernels() -> Iterator[Check]:
    """Yield a check for each operator, with the implementation that a run would use here. Cached on disk."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for operator in OPERATORS:
        try:
            backend = choose(operator, device, torch.bfloat16)
        except ArgumentError as error:  # HALFTUNE_KERNELS asks for what is not there
            yield Check(f"kernel {operator}", "fail", str(error), "unset that variable")
            continue
        found = verdict(operator, device, backend.name)
        what = f"{found.backend}: {found.detail} ({found.seconds:.1f} s; {backend.reason})"
        remedy = "" if found.passed else f"set HALFTUNE_KERNELS_{operator.upper()}=torch, and please report it"
        yield Check(f"kernel {operator}", "ok" if found.passed else "fail", what, remedy)
