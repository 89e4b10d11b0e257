"""Rotary tables reach attention in the compute dtype, so that they do not promote query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype


def hand_over_in_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Casts what rotary modules return, the cosines and sines, to the plan's compute dtype under autocast.

    They are computed in fp32 and returned in the dtype of the hidden states. With fp32 master weights that is fp32,
    and ``q * cos`` would promote query and key in every layer. The tables themselves stay fp32.
    """
    if not plan.precision.autocast.value:
        return
    compute = torch_dtype(plan.precision.compute.value)

    def cast(_module: nn.Module, _inputs: tuple, output: Any) -> Any:
        tables = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(table, torch.Tensor) and table.is_floating_point() for table in tables):
            return None  # complex tables rotate by multiplication of their own; they are cast back there
        if not torch.is_autocast_enabled(tables[0].device.type):
            return None
        brought = tuple(table.to(compute) for table in tables)
        return brought if isinstance(output, tuple) else brought[0]

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(cast)
