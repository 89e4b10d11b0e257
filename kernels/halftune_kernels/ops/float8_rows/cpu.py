"""Rounding to float8 by rows in plain torch, on every device."""

from __future__ import annotations

import torch

from halftune_kernels.ops.float8_rows.reference import LARGEST


def quantise(x: torch.Tensor, columns: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the float8 values and the scales."""
    v = x.to(torch.promote_types(x.dtype, torch.float32))
    if columns is not None:
        v = v * columns
    top = v.abs().amax(1, keepdim=True)
    scales.copy_(torch.where(top > 0, top / LARGEST, 1.0))
    values.copy_((v / scales).clamp_(-LARGEST, LARGEST))
