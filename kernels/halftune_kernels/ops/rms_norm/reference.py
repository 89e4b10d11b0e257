"""The formula of root-mean-square normalisation, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x / √(mean(x²) + eps) · (weight + offset)`` over the last dimension (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
