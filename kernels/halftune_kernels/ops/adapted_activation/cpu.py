"""Gated activations between low-rank updates in plain torch, on every device, for GPUs without the kernels."""

from __future__ import annotations

import torch

from halftune_kernels.ops.adapted_activation.call import Call
from halftune_kernels.ops.gated_activation import cpu as gated
from halftune_kernels.ops.gated_activation.reference import act


def _updated(x: torch.Tensor, low: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.to(wide).addmm_(low.to(wide), b.to(x.dtype).to(wide).t(), alpha=scale)
        if x.dtype != wide
        else torch.addmm(x, low, b.to(wide).t(), alpha=scale)
    )


def _sides(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides of the activation with their updates."""
    rank = call.b_gate.shape[1]
    z = _updated(call.gate, call.low[:, :rank], call.b_gate, call.gate_scale)
    return z, _updated(call.up, call.low[:, rank:], call.b_up, call.up_scale)


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` ``[T, M]`` and ``y A_dᵀ``."""
    z, u = _sides(call)
    y = act(z, call.activation).mul_(u).to(call.gate.dtype)
    return y, y @ call.a_down.to(y.dtype).t()


def backward(
    grad: torch.Tensor, grad_low: torch.Tensor, call: Call, into: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the gradients of gate and up; returns those of both B and of A, in fp32 (fp64 for fp64)."""
    z, u = _sides(call)
    g = _updated(grad, grad_low, call.a_down.t(), 1.0)
    y = torch.empty_like(call.gate, memory_format=torch.contiguous_format)
    gated.backward(g, z, u, call.activation, (*into, y))
    wide, rank = z.dtype, call.b_gate.shape[1]
    pairs = ((into[0], call.low[:, :rank], call.gate_scale), (into[1], call.low[:, rank:], call.up_scale))
    of_gate, of_up = ((d.to(wide).t() @ side.to(wide)).mul_(scale) for d, side, scale in pairs)
    return of_gate, of_up, grad_low.to(wide).t() @ y.to(wide)
