"""Root-mean-square normalisation as registered operators; every implementation has `forward` and `backward`.

Shapes: T rows, H channels. Kept for the backward pass: the rows that were normalised and one number for each.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import differentiable, operator
from halftune_kernels.ops.rms_norm.cpu import Norm


def _module(x: torch.Tensor, backend: str | None) -> ModuleType:
    return implementation("rms_norm", x, backend)


def norm(x: torch.Tensor, call: Norm, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm ``[T, H]`` of rows ``[T, H]``, and 1 / root mean square ``[T, 1]``."""
    return _module(x, backend).forward(x, call)


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    call: Norm,
    wants_x: bool,
    wants_weight: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``x`` ``[T, H]`` and of the weight; empty if not wanted."""
    found = _module(x, backend).backward(grad, x, inverse, call, (wants_x, wants_weight))
    return tuple(x.new_empty(0) if one is None else one for one in found)  # type: ignore[return-value]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_norm(x: torch.Tensor, call: Norm, _: Any) -> Any:
    return x.new_empty(x.shape, dtype=call.dtype), x.new_empty(x.shape[0], 1, dtype=_wide(x))


def _fake_backward(_: Any, x: torch.Tensor, __: Any, call: Norm, wants_x: bool, wants_weight: bool, ___: Any) -> Any:
    return x.new_empty(x.shape if wants_x else 0), call.weight.new_empty(call.weight.shape if wants_weight else 0)


NORM = operator("rms_norm", norm, _fake_norm)
_BACKWARD = operator("rms_norm_backward", norm_backward, _fake_backward)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, *options = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    *ctx.options, ctx.backend = options


def _gradients(ctx: Any, grad: Any, _inverse: Any) -> tuple[Any, ...]:
    wants_x, wants_weight, *others = ctx.needs_input_grad
    grad_x, grad_weight = _BACKWARD(grad, *ctx.saved_tensors, *ctx.options, wants_x, wants_weight, ctx.backend)
    return grad_x if wants_x else None, grad_weight if wants_weight else None, *(None for _ in others)


differentiable("rms_norm", _gradients, _keep)
