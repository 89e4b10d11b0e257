"""The formula of the gated feed-forward layer, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

import torch

from halftune_kernels.ops.gated_activation.reference import reference as gated
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight
from halftune_kernels.ops.lora_linear.reference import reference as linear


def reference(
    x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight, activation: str = "silu"
) -> torch.Tensor:
    """``down(act(gate(x)) · up(x))`` (arXiv:2002.05202) for ``x`` ``[..., H]``; ``[..., H]``."""
    return linear(gated(linear(x, gate), linear(x, up), activation), down)
