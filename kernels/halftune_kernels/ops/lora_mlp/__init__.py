"""A gated feed-forward layer with low-rank updates: ``down(act(gate(x)) · up(x))``."""

from __future__ import annotations

import torch

from halftune_kernels.library import opaque
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight
from halftune_kernels.ops.lora_mlp import cpu

__all__ = ["lora_mlp"]


def lora_mlp(
    x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight, activation: str = "silu"
) -> torch.Tensor:
    """``down(act(gate(x)) · up(x))``.

    Computed in the dtype of ``x``, weights are cast to it. Gradients reach ``x`` and the updates' factors; weights and
    biases are taken for frozen.

    Args:
        x: ``[..., H]``, a floating dtype.
        gate, up: from H to M.
        down: from M to H.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``; CPUs have a fast path for the first.

    Returns:
        ``[..., H]``, contiguous, in the dtype of ``x``.
    """
    flat = x.reshape(-1, x.shape[-1])
    if opaque(x) or activation != "silu":
        from halftune_kernels.ops.lora_mlp import stacked  # for GPUs and graphs

        out = stacked.lora_mlp(flat, gate, up, down, activation)
    else:
        out = cpu.lora_mlp(flat, gate, up, down)
    return out.view(*x.shape[:-1], out.shape[-1])
