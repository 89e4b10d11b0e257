"""Keeps queries and keys in the compute dtype: type promotion in rotary embeddings and norms would widen them."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype

_QK_NORM = re.compile(r"(^|\.)(q|k|v|qk|query|key)_?(layer_?)?norm$")


def cast_qk_to_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Cast the outputs of rotary modules and query/key norms to the compute dtype under autocast.

    Cosines and sines are computed in fp32 and returned in the dtype of the hidden states: with fp32 master weights,
    ``q * cos`` would promote query and key to fp32 in every layer. A norm's fp32 weight has the same effect. Tables,
    weights and the norm's arithmetic stay fp32; only the outputs are rounded, as autocast would. A rotary module whose
    output is one tensor returns angles, which no half format holds (bf16 shifts position 100 by up to 0.25 rad).
    """
    if not plan.precision.autocast.value:
        return
    cast = partial(_cast, torch_dtype(plan.precision.compute.value))
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(lambda *one: cast(*one) if isinstance(one[-1], tuple) else None)
        elif _QK_NORM.search(name):
            module.register_forward_hook(cast)


def _cast(compute: torch.dtype, _module: nn.Module, _inputs: tuple, output: Any) -> Any:
    """A forward hook: the output in the compute dtype; None, which keeps it, outside autocast."""
    tensors = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(tensor, torch.Tensor) and tensor.is_floating_point() for tensor in tensors):
        return None
    if not torch.is_autocast_enabled(tensors[0].device.type):
        return None
    cast = tuple(tensor.to(compute) for tensor in tensors)
    return cast if isinstance(output, tuple) else cast[0]
