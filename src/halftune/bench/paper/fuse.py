"""Fuses layers of a model without numbers, which are compared with their operators on a small copy with numbers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from halftune.model.fused import fuse
from halftune.plan import Plan

_SHRINK = 32  # sizes of the copy: one of so many


@contextmanager
def fused_on_paper(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Fuse the layers that the plan would fuse, until the context ends; gives what was done."""
    if not plan.batch.fused_layers.value:
        yield f"none, {plan.batch.fused_layers.reason}"
        return
    with _disable_current_modes(), unset_fake_temporarily():
        done = fuse(model, like=_small(model))
    try:
        yield str(done)
    finally:
        done.remove()


def _small(module: nn.Module) -> nn.Module:
    """A copy on the CPU with random weights, every size divided by ``_SHRINK``; equal sizes stay equal."""
    memo: dict[int, Any] = {id(code): code for code in sys.modules.values()}  # some hooks hold a Python module
    for parameter in [*module.parameters(), *module.buffers()]:
        shape = [size if size == 1 else max(2, size // _SHRINK) for size in parameter.shape]
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0  # sums of products stay in the range of fp16
        real = (scale * torch.randn(shape, dtype=torch.float32)).to(parameter.dtype)
        kept = nn.Parameter(real, requires_grad=parameter.requires_grad)
        memo[id(parameter)] = kept if isinstance(parameter, nn.Parameter) else real
    for layer in module.modules():
        if type(layer).__name__ == "Linear4bit" and isinstance(layer, nn.Linear):  # as a plain layer: the same is fused
            memo[id(layer)] = _plain(layer, memo)
    small = copy.deepcopy(module, memo)
    for one in small.modules():
        if isinstance(size := vars(one).get("group_size"), int):  # channels of a norm
            one.group_size = max(1, size // _SHRINK)  # pyright: ignore[reportArgumentType]
    return small


def _plain(layer: nn.Linear, memo: dict[int, Any]) -> nn.Linear:
    """A small frozen layer in place of a packed one."""
    sizes = (max(2, size // _SHRINK) for size in (layer.in_features, layer.out_features))
    dtype = layer.compute_dtype  # pyright: ignore[reportAttributeAccessIssue]
    made: Any = nn.Linear(*sizes, bias=False, dtype=dtype).requires_grad_(False)  # pyright: ignore[reportArgumentType]
    made.bias = None if layer.bias is None else memo[id(layer.bias)]
    return made.train(layer.training)
