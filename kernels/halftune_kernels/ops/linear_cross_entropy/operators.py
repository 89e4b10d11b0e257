"""A chunk of logits to losses and gradient as a registered operator."""

from __future__ import annotations

from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import operator


def losses_in_place(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, smoothing: float, wanted: bool, backend: str | None
) -> torch.Tensor:
    """Losses ``[N]`` of logits ``[N, V]``, fp32 (fp64 for fp64), 0 where the target is negative.

    If ``wanted``, the gradient of their sum times ``scale`` is written over the logits. Nothing is read on the host.
    """
    found = implementation("linear_cross_entropy", logits, backend)
    return found.losses_in_place(logits, targets, scale, smoothing, wanted)


def _fake(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


LOSSES = operator("cross_entropy_", losses_in_place, _fake, mutates=("logits",))
