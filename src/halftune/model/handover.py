"""What fp32 tables and fp32 norms hand to attention arrives in the compute dtype, so that it promotes nothing."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype

_QK_NORM = re.compile(r"(^|\.)(q|k|v|qk|query|key)_?(layer_?)?norm$")


def hand_over_in_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Casts what rotary modules and the norms of query and key return to the plan's compute dtype under autocast.

    Cosines and sines are computed in fp32 and returned in the dtype of the hidden states: with fp32 master weights that
    is fp32, and ``q * cos`` would promote query and key in every layer. A norm's fp32 weight does the same. The tables
    and the weights themselves stay fp32, and norms are computed in fp32: only what attention gets is rounded, as
    autocast would round it there.
    """
    if not plan.precision.autocast.value:
        return
    compute = torch_dtype(plan.precision.compute.value)

    def cast(_module: nn.Module, _inputs: tuple, output: Any) -> Any:
        tensors = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(tensor, torch.Tensor) and tensor.is_floating_point() for tensor in tensors):
            return None  # complex tables rotate by multiplication of their own; they are cast back there
        if not torch.is_autocast_enabled(tensors[0].device.type):
            return None
        brought = tuple(tensor.to(compute) for tensor in tensors)
        return brought if isinstance(output, tuple) else brought[0]

    for name, module in model.named_modules():
        if type(module).__name__.endswith("RotaryEmbedding") or _QK_NORM.search(name):
            module.register_forward_hook(cast)
