"""The formula of a linear layer with a low-rank update, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from halftune_kernels.ops.float8_linear import Float8Weight


class Packed(NamedTuple):
    """A frozen weight in a compressed format, unpacked at each use; on GPUs only.

    Attributes:
        make: returns the weight ``[O, I]``.
        shape: O, I.
    """

    make: Callable[[], torch.Tensor]
    shape: tuple[int, int]


class AdaptedWeight(NamedTuple):
    """A frozen linear layer and its low-rank update (arXiv:2106.09685).

    Shapes: I inputs, O outputs, R rank.

    Attributes:
        weight: ``[O, I]``, without a gradient; perhaps packed, or in float8.
        bias: ``[O]``, without a gradient, or None.
        a: ``[R, I]``, or None where the layer has no update.
        b: ``[O, R]``, or None likewise.
        scale: factor of the update, α / R for plain LoRA.
    """

    weight: torch.Tensor | Packed | Float8Weight
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0


def dense(weight: torch.Tensor | Packed | Float8Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype``."""
    return (weight if isinstance(weight, torch.Tensor) else weight.make()).to(dtype)


def reference(x: torch.Tensor, layer: AdaptedWeight) -> torch.Tensor:
    """``x W ᵀ + bias + scale · (x Aᵀ) Bᵀ`` for ``x`` ``[..., I]``; ``[..., O]``."""
    y = F.linear(x, dense(layer.weight, x.dtype), layer.bias)
    if layer.a is None or layer.b is None:
        return y
    return y + layer.scale * F.linear(F.linear(x, layer.a), layer.b)
