"""Time of chunked linear-attention kernels, which neither their traffic nor large products bound."""

from __future__ import annotations

from typing import Any

import torch

from halftune.bench.paper.costs import tensors_in
from halftune.hardware.roofline import SCANS


def scan_seconds(name: str, args: Any) -> float:
    """Seconds on Hopper by ``SCANS``; 0 for other kernels.

    Operands are ``[B, T, H, D]``. Samples of a packed row run side by side; the chain is taken as long as the row.
    """
    if name not in SCANS:
        return 0.0
    sequences = [tensor for tensor in tensors_in(args) if tensor.ndim == 4 and tensor.is_floating_point()]
    if not sequences:
        return 0.0
    largest: torch.Tensor = max(sequences[:6], key=lambda tensor: tensor.shape[1] * tensor.shape[2])
    batch, tokens, heads, _ = largest.shape
    by_token, by_head = SCANS[name]
    return by_token * tokens + by_head * batch * tokens * heads
