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
    out, _, inverse = _module(x, backend).forward(x, None, call)
    return out, inverse


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, call: Norm, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of the sum, the sum, and 1 / root mean square of the sum."""
    return _module(x, backend).forward(x, residual, call)


def norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    inverse: torch.Tensor,
    call: Norm,
    wants_x: bool,
    wants_weight: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``total`` ``[T, H]``, to which ``grad_total`` is added, and of the weight; empty if not wanted."""
    found = _module(total, backend).backward(grad, grad_total, total, inverse, call, (wants_x, wants_weight))
    return tuple(total.new_empty(0) if one is None else one for one in found)  # type: ignore[return-value]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_norm(x: torch.Tensor, call: Norm, _: Any) -> Any:
    return x.new_empty(x.shape, dtype=call.dtype), x.new_empty(x.shape[0], 1, dtype=_wide(x))


def _fake_add_norm(x: torch.Tensor, _: Any, *rest: Any) -> Any:
    out, inverse = _fake_norm(x, *rest)
    return out, x.new_empty(x.shape), inverse


def _fake_backward(_: Any, __: Any, total: torch.Tensor, ___: Any, call: Norm, x: bool, w: bool, ____: Any) -> Any:
    return total.new_empty(total.shape if x else 0), call.weight.new_empty(call.weight.shape if w else 0)


NORM = operator("rms_norm", norm, _fake_norm)
ADD_NORM = operator("add_rms_norm", add_norm, _fake_add_norm)
_BACKWARD = operator("rms_norm_backward", norm_backward, _fake_backward)


def _keep(ctx: Any, total: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor, *options: Any) -> None:
    ctx.save_for_backward(total, inverse, weight)
    ctx.mark_non_differentiable(inverse)
    ctx.set_materialize_grads(False)
    *ctx.options, ctx.backend = options


def _keep_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    _keep(ctx, inputs[0], output[1], *inputs[1:])


def _keep_add_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    _keep(ctx, output[1], output[2], *inputs[2:])


def _gradients(ctx: Any, grad: Any, grad_total: Any, wants_x: bool, wants_weight: bool) -> tuple[Any, Any]:
    if grad is None:  # only the sum was used
        return grad_total, None
    kept = *ctx.saved_tensors, *ctx.options
    grad_x, grad_weight = _BACKWARD(grad, grad_total, *kept, wants_x, wants_weight, ctx.backend)
    return grad_x if wants_x else None, grad_weight if wants_weight else None


def _norm_gradients(ctx: Any, grad: Any, _inverse: Any) -> Any:
    return *_gradients(ctx, grad, None, *ctx.needs_input_grad[:2]), None, None, None, None, None


def _add_norm_gradients(ctx: Any, grad: Any, grad_total: Any, _inverse: Any) -> Any:
    needs = ctx.needs_input_grad
    grad_x, grad_weight = _gradients(ctx, grad, grad_total, needs[0] or needs[1], needs[2])
    return grad_x, grad_x, grad_weight, None, None, None, None, None


differentiable("rms_norm", _norm_gradients, _keep_norm)
differentiable("add_rms_norm", _add_norm_gradients, _keep_add_norm)
