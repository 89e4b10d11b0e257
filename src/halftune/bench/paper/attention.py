"""Fused attention, an opaque operator: torch's choice of it, FLOPs from the samples' lengths, kernels and scratch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

aten = torch.ops.aten
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


def attend_as_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by the kernel that torch chooses on the planned GPU.

    On a CPU torch chooses one of its own. Autocast casts operands to its dtype first.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    with torch.autocast("cuda", enabled=False):
        kernel = _kernel(query, key, value, masked=attn_mask is not None, is_causal=is_causal)
        if kernel == "flash":
            given = (query, key, value, dropout_p, is_causal)
            return aten._scaled_dot_product_flash_attention(*given, scale=scale)[0]
        if kernel == "math":
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            return aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, query.new_zeros(()), float("-inf"))
        given = (query, key, value, attn_mask, True, dropout_p, is_causal)
        return aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masked: bool, is_causal: bool
) -> Literal["flash", "efficient", "math"]:
    """The kernel for ``[B, H, T, D]``, ``[B, G, S, D]`` and ``[B, G, S, E]``.

    By the conditions of ATen/native/transformers/cuda/sdp_utils.cpp, and torch's docstring on grouped heads. cuDNN's
    kernel, which some builds prefer on Hopper, counts as FlashAttention-2.
    """
    ampere, half = torch.cuda.get_device_capability() >= (8, 0), query.dtype in (torch.float16, torch.bfloat16)
    size, of_values = query.shape[-1], value.shape[-1]
    square = query.shape[-2] == key.shape[-2]
    if ampere and half and not masked and size == of_values <= 256 and (square or not is_causal):
        return "flash"
    known = half or query.dtype is torch.float32
    supported = known and (ampere or query.dtype is not torch.bfloat16) and query.shape[1] == key.shape[1]
    aligned = 8 if half else 4 if ampere else 1  # elements of a row
    return "efficient" if supported and size % aligned == of_values % aligned == 0 else "math"


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
