"""Linear layers with low-rank updates that read the same input: ``y_i = x W_iᵀ + bias_i + s_i (x A_iᵀ) B_iᵀ``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halftune_kernels.library import opaque
from halftune_kernels.ops.lora_linear import cpu
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight, Packed, reference

__all__ = ["AdaptedWeight", "Packed", "lora_linear", "reference"]


def lora_linear(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> tuple[torch.Tensor, ...]:
    """``x W_iᵀ + bias_i + s_i (x A_iᵀ) B_iᵀ`` for every layer.

    Products are computed in the dtype of ``x``, weights are cast to it; the updates are added in the products' own
    accumulators. Gradients reach ``x``, the ``a`` and the ``b``; weights and biases are taken for frozen. The gradient
    of ``x`` is summed over the layers in place.

    Args:
        x: ``[..., I]``, a floating dtype.
        layers: all with I inputs.

    Returns:
        One ``[..., O_i]`` for each layer, contiguous, in the dtype of ``x``.
    """
    rows = x.reshape(-1, x.shape[-1])
    if opaque(x):
        from halftune_kernels.ops.lora_linear import stacked  # for GPUs and graphs

        outputs = stacked.lora_linear(rows, layers)
    else:
        outputs = cpu.lora_linear(rows, layers)
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)
