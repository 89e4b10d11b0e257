"""The attention functions: signatures of flash-attn 2.8.3, its checks from the contract, sums in fp32.

B batch, T queries, S keys, H query heads, G key heads, D head size; N and M tokens of packed rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from flash_attn import pretend
from halftune.attention.contract import Call, Operand, lacks_backward, violations


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
):
    """``[B, T, H, D]``, ``[B, S, G, D]`` twice → ``[B, T, H, D]``."""
    pretend.calls.append(("flash_attn_func", (q.dtype, k.dtype, v.dtype)))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    (q, k, v), size = _mended(q, k, v)
    _check(Call(*map(Operand.of, (q, k, v)), **_options(dropout_p, softcap, alibi_slopes)))
    out = _attend(q, k, v, scale, dropout_p, causal, window_size, softcap, alibi_slopes)[..., :size]
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
):
    """Packed rows: ``[N, H, D]``, ``[M, G, D]`` twice → ``[N, H, D]``."""
    pretend.calls.append(("flash_attn_varlen_func", (q.dtype, k.dtype, v.dtype)))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    (q, k, v), size = _mended(q, k, v)
    lengths = (Operand.of(cu_seqlens_q), Operand.of(cu_seqlens_k))
    options = _options(dropout_p, softcap, alibi_slopes)
    _check(Call(*map(Operand.of, (q, k, v)), kind="varlen", cu_seqlens=lengths, **options))
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    longest = max((b - a for a, b in pairwise(bounds_q)), default=0)
    assert max_seqlen_q >= longest, "the kernel would leave queries unwritten"
    parts = [
        _attend(q[a:b][None], k[c:d][None], v[c:d][None], scale, dropout_p, causal, window_size, softcap, alibi_slopes)[
            0
        ]
        for (a, b), (c, d) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True)
    ]
    out = torch.cat(parts)[..., :size]
    return (out, None, None) if return_attn_probs else out


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs):
    """``kv`` ``[B, S, 2, G, D]``."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **kwargs):
    """``qkv`` ``[B, T, 3, H, D]``."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs):
    """``kv`` ``[M, 2, G, D]``."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **kwargs):
    """``qkv`` ``[N, 3, H, D]``."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *lengths, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | None = None,
    causal: bool = False,
):
    """``[B, T, H, D]``; writes ``k``, ``v`` ``[B, T, G, D]`` into the caches ``[B, S, G, D]`` at ``cache_seqlens``."""
    pretend.calls.append(("flash_attn_with_kvcache", (q.dtype, k_cache.dtype, v_cache.dtype)))
    _check(Call(*map(Operand.of, (q, k_cache, v_cache)), **_options(0.0, 0.0, None)))
    end = cache_seqlens or 0
    if k is not None and v is not None:
        for name, new, cache in (("key", k, k_cache), ("value", v, v_cache)):
            if new.dtype != q.dtype:
                raise RuntimeError(f"query and {name} must have the same dtype")
            cache[:, end : end + new.shape[1]] = new
        end += k.shape[1]
    return _attend(q, k_cache[:, :end], v_cache[:, :end], q.shape[-1] ** -0.5, 0.0, causal, (-1, -1), 0.0, None)


def _options(dropout: float, softcap: float, alibi: Tensor | None) -> dict:
    slopes = None if alibi is None else Operand.of(alibi)
    return {"capability": pretend.capability, "dropout": dropout, "softcap": softcap, "alibi": slopes}


def _mended(*operands: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """What the package's Python side mends: the last stride, and head sizes that are no multiple of 8."""
    size = operands[0].shape[-1]
    pad = -size % 8
    whole = [operand if operand.stride(-1) == 1 else operand.contiguous() for operand in operands]
    return tuple(nn.functional.pad(operand, (0, pad)) if pad else operand for operand in whole), size


def _check(call: Call) -> None:
    for text in violations(call):
        raise RuntimeError(text)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi: Tensor | None,
) -> Tensor:
    """Causality and windows are aligned to the last key; a query that sees nothing gives zero."""
    if lacks_backward(pretend.capability, q.shape[-1], dropout):
        q, k, v = (_Unwritten.apply(operand) for operand in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        queries, keys, values = (operand.transpose(1, 2).float() for operand in (q, k, v))
        shared = queries.shape[1] // keys.shape[1]
        keys, values = (operand.repeat_interleave(shared, 1) for operand in (keys, values))
        scores = queries @ keys.mT * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        rows, columns = scores.shape[-2:]
        at = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)[None]  # how far a key lies back
        if alibi is not None:
            scores = scores - alibi[..., None, None] * at.abs()
        left, right = window[0], 0 if causal else window[1]
        seen = torch.ones_like(at, dtype=torch.bool)
        if left >= 0:
            seen &= at <= left
        if right >= 0:
            seen &= at >= -right
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        weights = nn.functional.dropout(weights, dropout)
        return (weights @ values).to(q.dtype).transpose(1, 2)


class _Unwritten(torch.autograd.Function):
    """Gradients that no kernel writes."""

    @staticmethod
    def forward(ctx, operand: Tensor) -> Tensor:
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], float("nan"))
