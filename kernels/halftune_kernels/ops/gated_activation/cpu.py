"""Gated activations in plain torch, on every device; for CPUs `lora_mlp` has chunks that stay in the cache."""

from __future__ import annotations

import torch

from halftune_kernels.ops.gated_activation.reference import Into, act

_aten = torch.ops.aten


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes ``act(gate) · up`` to ``out``."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    out.copy_(act(gate.to(wide), activation).mul_(up))


def backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, into: Into) -> None:
    """Writes the gradients of gate and up, and ``act(gate) · up`` unless None; outputs may be the inputs."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    z, u, g = gate.to(wide), up.to(wide), grad.to(wide)
    acted = act(z, activation)
    if activation == "silu":
        slope = _aten.silu_backward(g * u, z)
    else:
        slope = _aten.gelu_backward(g * u, z, approximate="tanh" if activation == "gelu_tanh" else "none")
    for place, value in zip(into, (slope, acted * g, acted * u), strict=True):
        if place is not None:
            place.copy_(value)
