"""L2 norm of queries and keys, as the delta-rule models define it: the small number is added under the root."""

from __future__ import annotations

import torch

EPSILON = 1e-6


def l2_normalise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / √(‖x‖² + ε) over the last dimension, and 1 / √(‖x‖² + ε) with that dimension kept."""
    inverse = torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)
    return vectors * inverse, inverse


def l2_normalise_backward(gradient: torch.Tensor, unit: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Gradient of x from that of x̂ = x · r: r (dx̂ - x̂ ⟨x̂, dx̂⟩)."""
    along = (unit * gradient).sum(-1, keepdim=True)
    return torch.addcmul(gradient, unit, along, value=-1.0).mul_(inverse)
