"""The formula of the head's cross-entropy, in plain torch and the dtype of its inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``Σ -log softmax(hidden Wᵀ + bias)[target]`` over the rows whose target is not -100."""
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")
