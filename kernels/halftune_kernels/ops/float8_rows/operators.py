"""Rounding to float8 by rows as a registered operator."""

from __future__ import annotations

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import operator


def _empty(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def quantise(x: torch.Tensor, columns: torch.Tensor | None, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[T, C]`` and scales ``[T, 1]``."""
    values, scales = _empty(x)
    implementation("float8_rows", x, backend).quantise(x, columns, values, scales)
    return values, scales


QUANTISE = operator("float8_rows", quantise, lambda x, *_: _empty(x))
