"""flash_attn's functions in plain torch, for models that import them and fp32 plans, which its kernels do not support.

Signatures and semantics are those of flash-attn 2.8. Scores are materialised: exact, on any device, and slow.
B rows, T queries, S keys, H query heads, G key heads, D head size; N and M tokens of packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``[B, T, H, D]``, ``[B, S, G, D]`` twice → ``[B, T, H, D]``; probabilities are not returned (None)."""
    scores_BHTS = _scores(q, k, softmax_scale, softcap)
    back_TS = _distance(q.shape[1], k.shape[1], q.device)
    if alibi_slopes is not None:
        scores_BHTS = scores_BHTS - alibi_slopes[..., None, None] * back_TS.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden_TS = torch.zeros_like(back_TS, dtype=torch.bool)
    if left >= 0:
        hidden_TS |= back_TS > left
    if right >= 0:
        hidden_TS |= back_TS < -right
    weights = scores_BHTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
    weights = weights.masked_fill(hidden_TS.all(-1, keepdim=True), 0.0)  # a query without visible keys gives zero
    weights = torch.nn.functional.dropout(weights, dropout_p)
    out = torch.einsum("bhts,bshd->bthd", weights, _for_heads(v, q).float()).to(q.dtype)
    return (out, None, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Packed rows: ``[N, H, D]``, ``[M, G, D]`` twice → ``[N, H, D]``.

    Raises:
        NotImplementedError: a paged cache.
    """
    if block_table is not None:
        raise NotImplementedError("paged caches are not supported")
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    parts = []
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for row, ((a, b), (c, d)) in enumerate(bounds):
        slopes = alibi_slopes[row] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        parts.append(flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *options, slopes)[0])
    out = torch.cat(parts)
    return (out, None, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``kv`` ``[B, S, 2, G, D]``."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``qkv`` ``[B, T, 3, H, D]``."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``kv`` ``[M, 2, G, D]``."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """``qkv`` ``[N, 3, H, D]``."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


IN_TORCH: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
}
"""The functions by name; not affected when the guard replaces the module's attributes."""


def _scores(q: Tensor, k: Tensor, scale: float | None, softcap: float) -> Tensor:
    """``[B, H, T, S]`` fp32."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bthd,bshd->bhts", q.float(), _for_heads(k, q).float()) * factor
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    """``[T, S]``: query position minus key position; the last query is at the last key."""
    at = torch.arange(queries, device=device) + keys - queries
    return at[:, None] - torch.arange(keys, device=device)


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """``[B, S, G, D]`` → ``[B, S, H, D]``: repeat key or value heads for the query heads that share them."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)
