"""The formula of a gated activation, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # for gradients of gate and up, and ``act(gate) · up``


def act(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """``silu``, ``gelu`` or its approximation ``gelu_tanh``."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def reference(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``act(gate) · up`` (arXiv:2002.05202, SwiGLU and GEGLU)."""
    return act(gate, activation) * up
