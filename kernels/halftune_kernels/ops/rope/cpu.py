"""Rotary position embedding in plain torch, on every device."""

from __future__ import annotations

import torch

from halftune_kernels.ops.rope.call import Call
from halftune_kernels.ops.rope.reference import rotate as rotated


def rotate(call: Call, out: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Writes both, rotated, to ``out``."""
    for x, place in zip((call.q, call.k), out, strict=True):
        place.copy_(rotated(x, call.cos, call.sin, call.form, call.inverse, place.dtype))
