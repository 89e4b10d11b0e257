"""Linear layers in float8, where the plan says so: frozen ones by halftune's operators, trained ones by torchao."""

from __future__ import annotations

import torch
from torch import nn

from halftune.core.optional import need
from halftune.plan import Plan


def use_float8(model: nn.Module, plan: Plan, *, emulate: bool, device: torch.device | None = None) -> None:
    """Let linear layers compute in float8. Parameters that are trained keep names, dtypes and identity.

    Args:
        model: with its adapter, or trained in full.
        plan: as it runs.
        emulate: whether trained layers multiply in fp32 what they have rounded to float8, as CPUs must.
        device: where frozen weights are rounded and stay; None for where they are.

    Raises:
        MissingPackageError: torchao is required and not installed.
    """
    if plan.precision.trains_in_float8:
        need("torchao", why="precision.linear: fp8 with adapter: none")
        from halftune.model.float8_training import train_in_float8

        train_in_float8(model, plan, emulate=emulate)
    elif plan.precision.linear is not None:
        from halftune.model.load.float8 import round_to_float8  # few runs have float8 weights

        round_to_float8(model, plan, device)
