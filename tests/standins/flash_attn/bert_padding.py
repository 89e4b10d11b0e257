"""Removing and restoring the padding of a batch, as models that import flash_attn by hand do it."""

from __future__ import annotations

import torch
from torch import nn


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` at ``indices``."""
    return x[indices]


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None):
    """``[B, T, …]`` → tokens ``[N, …]``, their indices, ``cu_seqlens`` int32, the longest row, counts per row."""
    used = mask if unused_mask is None else mask + unused_mask
    counts, taken = used.sum(-1, dtype=torch.int32), mask.sum(-1, dtype=torch.int32)
    indices = used.flatten().nonzero().flatten()
    cu = nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, cu, int(counts.max()), taken


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The way back: ``[N, …]`` → ``[B, T, …]``, zeros at padding."""
    whole = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    return whole.index_copy(0, indices, hidden).unflatten(0, (batch, seqlen))
