"""The formula of a linear layer with a low-rank update, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


class AdaptedWeight(NamedTuple):
    """A frozen linear layer and its low-rank update (arXiv:2106.09685).

    Shapes: I inputs, O outputs, R rank.

    Attributes:
        weight: ``[O, I]``, without a gradient.
        bias: ``[O]``, without a gradient, or None.
        a: ``[R, I]``, or None where the layer has no update.
        b: ``[O, R]``, or None likewise.
        scale: factor of the update, α / R for plain LoRA.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0


def reference(x: torch.Tensor, layer: AdaptedWeight) -> torch.Tensor:
    """``x W ᵀ + bias + scale · (x Aᵀ) Bᵀ`` for ``x`` ``[..., I]``; ``[..., O]``."""
    y = F.linear(x, layer.weight, layer.bias)
    if layer.a is None or layer.b is None:
        return y
    return y + layer.scale * F.linear(F.linear(x, layer.a), layer.b)
