"""Gated activations as registered operators; every implementation has `forward` and `backward`.

Shapes: T rows, M channels.
"""

from __future__ import annotations

from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import differentiable, operator


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, backend: str | None) -> torch.Tensor:
    """``act(gate) · up``."""
    out = gate.new_empty(gate.shape)
    implementation("gated_activation", gate, backend).forward(gate, up, activation, out)
    return out


def slopes(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up."""
    into = gate.new_empty(gate.shape), gate.new_empty(gate.shape), None
    implementation("gated_activation", gate, backend).backward(grad, gate, up, activation, into)
    return into[:2]


def slopes_in_place(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, backend: str | None
) -> None:
    """Writes the gradients of gate and up over them, and ``act(gate) · up`` over its gradient."""
    implementation("gated_activation", gate, backend).backward(grad, gate, up, activation, (gate, up, grad))


def _fake_slopes(grad: torch.Tensor, gate: torch.Tensor, *_: Any) -> Any:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


ACT = operator("gated_activation", activate, lambda gate, *_: gate.new_empty(gate.shape))
SLOPES = operator("gated_activation_backward", slopes, _fake_slopes)
# for those who own gate and up: three passes read, three written, no memory
SLOPES_IN_PLACE = operator(
    "gated_activation_backward_", slopes_in_place, lambda *_: None, mutates=("grad", "gate", "up")
)


def _keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    gate, up, ctx.activation, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, grad: torch.Tensor) -> Any:
    return *SLOPES(grad, *ctx.saved_tensors, ctx.activation, ctx.backend), None, None


differentiable("gated_activation", _gradients, _keep)
