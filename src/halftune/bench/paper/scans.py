"""Chunked linear-attention kernels: their FLOPs, and their time, which neither traffic nor large products bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halftune.bench.paper.costs import tensors_in
from halftune.hardware.roofline import SCANS

# Products of a kernel, by its package and name: how many of [C, C] · [C, K], of [C, C] · [C, V] and of [C, K] · [K, V],
# or as large, and of [C, C] · [C, C], for each chunk of C rows and value head. A block of the inverse counts as its
# part: its 40 products of 16 rows are 40 / 64 of one of 64.
_INVERSE = 0.625
_PRODUCTS: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("gated_delta_rule", "solve"): (1 + 0.625, 0, 0, _INVERSE),  # of K Kᵀ the blocks below and on the diagonal
    ("gated_delta_rule", "scan_forward"): (0, 2, 3, 0),
    ("gated_delta_rule", "scan_backward"): (0, 2, 3, 0),
    ("gated_delta_rule", "chunk_backward"): (5, 4, 3, 0),
    ("ssd", "prepare"): (1, 0, 0, 0),
    ("ssd", "scan_forward"): (0, 1, 2, 0),
    ("ssd", "scan_backward"): (0, 1, 2, 0),
    ("ssd", "chunk_backward"): (3, 2, 2, 0),
    ("scan", "scan_forward"): (0, 1, 3, 0),  # of kda and rwkv7
    ("scan", "scan_backward"): (0, 1, 3, 0),
    ("kda", "products"): (4, 0, 0, 0),
    ("kda", "solve"): (1, 1, 0, _INVERSE),
    ("kda", "square_gradients"): (0, 3, 0, 0),
    ("kda", "chunk_backward"): (5, 0, 4, 0),
    ("rwkv7", "products"): (8, 0, 0, 0),
    ("rwkv7", "solve"): (1, 2, 0, _INVERSE),
    ("rwkv7", "square_gradients"): (0, 7, 1, 0),
    ("rwkv7", "chunk_backward"): (9.25, 0, 6, 0),
}
_VALUES = 6  # place of the values of rwkv7's forward scan, which have two more products; None in kda's


def scan_flops(module: str, name: str, args: tuple[Any, ...], sizes: Mapping[str, Any]) -> float:
    """FLOPs of a kernel's products; 0 for kernels without.

    Args:
        module, name: of the kernel.
        args: its operands; the first is ``[B, T, ...]``.
        sizes: H key heads and HV value heads, K and V channels, C rows of a chunk; those that the kernel has.
    """
    package = module.rpartition(".")[0].rpartition(".")[2]
    if (package, name) not in _PRODUCTS:
        return 0.0
    keys, values, states, squares = _PRODUCTS[package, name]
    if (package, name) == ("scan", "scan_forward") and args[_VALUES] is not None:
        values, states = values + 1, states + 1
    chunk, k, v = sizes["C"], sizes.get("K", 0), sizes.get("V", 0)
    each = chunk * (keys * k + values * v + squares * chunk) + states * k * v
    batch, tokens = args[0].shape[:2]
    return 2.0 * batch * tokens * sizes.get("HV", sizes.get("H")) * each


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
