"""The formula of the head's cross-entropy, in plain torch and the dtype of its inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``Σ -log softmax(hidden Wᵀ + bias)[target]`` over the rows whose target is not -100, with label smoothing."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
