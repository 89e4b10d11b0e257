"""Rotary position embedding as a registered operator, whose backward pass is the operator itself, the other way round.

It writes new tensors: in place would move as many bytes, and autograd copies the gradients of changed views.
"""

from __future__ import annotations

from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import differentiable, operator
from halftune_kernels.ops.rope.call import Call


def rotate(call: Call, dtype: torch.dtype, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated, or rotated back with ``inverse``."""
    out = _empty(call.q, dtype), _empty(call.k, dtype)
    implementation("rope", call.q, backend).rotate(call, out)
    return out


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def _fake(call: Call, dtype: torch.dtype, backend: Any) -> Any:
    return _empty(call.q, dtype), _empty(call.k, dtype)


ROPE = operator("rope", rotate, _fake)


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    q, _, cos, sin, ctx.form, ctx.inverse, _, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)
    ctx.dtype = q.dtype


def _gradients(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> Any:
    found = ROPE(grad_q, grad_k, *ctx.saved_tensors, ctx.form, not ctx.inverse, ctx.dtype, ctx.backend)
    return *found, None, None, None, None, None, None


differentiable("rope", _gradients, _keep)
