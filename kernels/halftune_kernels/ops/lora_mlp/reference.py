"""The formula of the gated feed-forward layer, in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from halftune_kernels.ops.lora_linear.reference import AdaptedWeight
from halftune_kernels.ops.lora_linear.reference import reference as linear


def reference(x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight) -> torch.Tensor:
    """``down(silu(gate(x)) · up(x))`` (arXiv:2002.05202, SwiGLU) for ``x`` ``[..., H]``; ``[..., H]``."""
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)
