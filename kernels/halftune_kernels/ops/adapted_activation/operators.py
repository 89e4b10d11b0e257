"""Gated activations between low-rank updates as registered operators; every implementation has `forward` and
`backward`.

Shapes: T rows, M channels, R ranks. The updates are computed again in the backward pass, as the activation is.
"""

from __future__ import annotations

from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import differentiable, operator
from halftune_kernels.ops.adapted_activation.call import Call

_Tensor = torch.Tensor
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def activate(call: Call, backend: str | None) -> tuple[_Tensor, _Tensor]:
    """``y`` ``[T, M]`` and ``y A_dᵀ`` ``[T, R]``."""
    return implementation("adapted_activation", call.gate, backend).forward(call)


def slopes(
    grad: _Tensor, grad_low: _Tensor, call: Call, backend: str | None
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor]:
    """Gradients of gate, up, both B and A."""
    into = call.gate.new_empty(call.gate.shape), call.gate.new_empty(call.gate.shape)
    found = implementation("adapted_activation", call.gate, backend)
    return *into, *found.backward(grad, grad_low, call, into)


def slopes_in_place(grad: _Tensor, grad_low: _Tensor, call: Call, backend: str | None) -> _Three:
    """Writes the gradients of gate and up over them; returns those of both B and A, fp32 (fp64 for fp64)."""
    found = implementation("adapted_activation", call.gate, backend)
    return found.backward(grad, grad_low, call, (call.gate, call.up))


def _fake_act(call: Call, _: Any) -> Any:
    return call.gate.new_empty(call.gate.shape), call.gate.new_empty(call.gate.shape[0], call.a_down.shape[0])


def _fake_factors(grad: Any, grad_low: Any, call: Call, _: Any) -> Any:
    wide = torch.promote_types(call.gate.dtype, torch.float32)
    return tuple(call.gate.new_empty(one.shape, dtype=wide) for one in (call.b_gate, call.b_up, call.a_down))


def _fake_slopes(grad: Any, grad_low: Any, call: Call, _: Any) -> Any:
    into = call.gate.new_empty(call.gate.shape), call.gate.new_empty(call.gate.shape)
    return *into, *_fake_factors(grad, grad_low, call, _)


ACT = operator("adapted_activation", activate, _fake_act)
SLOPES = operator("adapted_activation_backward", slopes, _fake_slopes)
# for those who own gate and up
SLOPES_IN_PLACE = operator("adapted_activation_backward_", slopes_in_place, _fake_factors, mutates=("gate", "up"))


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    *call, ctx.backend = inputs
    ctx.save_for_backward(*call[:6])
    ctx.options = call[6:]


def _gradients(ctx: Any, grad: _Tensor, grad_low: _Tensor) -> Any:
    call = Call(*ctx.saved_tensors, *ctx.options)
    dgate, dup, *of_factors = SLOPES(grad, grad_low, *call, ctx.backend)
    sides = ((dgate, call.b_gate, call.gate_scale), (dup, call.b_up, call.up_scale))
    none = dgate.new_zeros(1)  # so that product and factor are rounded once
    dlow = torch.cat([torch.addmm(none, d, b.to(d.dtype), beta=0, alpha=scale) for d, b, scale in sides], 1)
    factors = call.b_gate, call.b_up, call.a_down
    back = (found.to(factor.dtype) for found, factor in zip(of_factors, factors, strict=True))
    return dgate, dup, dlow, *back, None, None, None, None


differentiable("adapted_activation", _gradients, _keep)
