"""Cost of fused attention, an opaque operator: FLOPs from the samples' lengths, kernels and scratch by backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

_NAMES = re.compile(
    r"flash_?attn|flash_attention|varlen_?attn|efficient_attention|cudnn_attention|flex_attention|fa[234]_|_varlen"
)
# Kernels by the names of operators; others are FlashAttention-2.
_KERNELS = (
    (re.compile("efficient"), "efficient"),
    (re.compile("flex"), "flex"),
    (re.compile(r"flash_attn_?3|fa3"), "fa3"),
    (re.compile(r"flash_attn_?4|fa4"), "fa4"),
)
_BOUNDS = re.compile(r"^cu_?\w+$|^cum_seq")
Lengths = Callable[[torch.Tensor], "list[int] | None"]


@dataclass(frozen=True)
class AttentionCost:
    """FLOPs, kernel launches, scratch bytes that are written and read again, and the key of the roofline's rate."""

    flops: float
    launches: int
    extra: int
    rate: str


def is_attention(name: str) -> bool:
    """Whether an operator is fused softmax attention."""
    return bool(_NAMES.search(name))


def attention_cost(name: str, arguments: Mapping[str, Any], lengths: Lengths) -> AttentionCost:
    """The cost of a call.

    Scores and their product with values are 2 · (D + E) FLOPs for a pair of positions and a head; backward computes
    five products where forward computes two. Only visible pairs count. FlashAttention's backward pass sums the
    queries' gradient in fp32, which is written and read once more.

    Args:
        name: of the operator.
        arguments: its operands by their names in the schema. Packed operands are ``[N, H, D]``.
        lengths: values of an integer vector, or None.
    """
    query, key, value = (arguments[name if name in arguments else name[0]] for name in ("query", "key", "value"))
    if query.ndim == 3:
        heads, whole = query.shape[1], [(query.shape[0], key.shape[0])]
        samples = _samples(arguments, lengths) or whole
    else:
        at, of_heads = (2, 1) if "scaled_dot_product" in name else (1, 2)  # [B, H, T, D], else [B, T, H, D]
        heads, samples = query.shape[of_heads], [(query.shape[at], key.shape[at])] * query.shape[0]
    window, causal = _window(arguments)
    pairs = sum(visible(q, k, causal=causal, window=window) for q, k in samples)
    flops = 2.0 * pairs * heads * (query.shape[-1] + value.shape[-1])
    kernel = next((kernel for pattern, kernel in _KERNELS if pattern.search(name)), "fa2")
    if "backward" in name or "bwd" in name:
        return AttentionCost(2.5 * flops, 3, query.numel() * 4, f"{kernel}/backward")
    return AttentionCost(flops, 1, 0, kernel)


def visible(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """Pairs of positions that see each other.

    Args:
        queries, keys: lengths of a sample; the last query is at the last key.
        causal: whether a query sees no later key.
        window: visible keys, the query's own included (without causality, as many again after it); None for all.
    """
    if not causal:
        return queries * (keys if window is None else min(keys, 2 * window - 1))
    first = keys - queries + 1  # keys up to the first query, itself included
    most = keys if window is None else min(window, keys)
    growing = max(0, min(queries, most - first + 1))
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * most


def _samples(given: Mapping[str, Any], lengths: Lengths) -> list[tuple[int, int]] | None:
    """Lengths of queries and keys of the samples of a packed row; None where they are unknown."""
    vectors = [value for name, value in given.items() if _BOUNDS.match(name) and isinstance(value, torch.Tensor)]
    known = [found for vector in vectors[:2] if (found := lengths(vector)) is not None]
    if not known:
        return None
    pairs = zip(pairwise(known[0]), pairwise(known[-1]), strict=True)
    return [(q[1] - q[0], k[1] - k[0]) for q, k in pairs if q[1] > q[0]]


def _window(given: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Window (the query included; None without one), and whether attention is causal."""
    pair = given.get("window_size") or given.get("window") or (given.get("left"), given.get("right"))
    if isinstance(pair, (list, tuple)) and pair[0] is not None and ("left" in given or tuple(pair) != (-1, -1)):
        return (int(pair[0]) + 1 if pair[0] >= 0 else None), pair[1] == 0
    left = given.get("window_size_left", given.get("window_left"))
    causal = given.get("is_causal", given.get("causal", given.get("custom_mask_type", 1)))
    return (int(left) + 1 if isinstance(left, int) and left >= 0 else None), bool(causal)
