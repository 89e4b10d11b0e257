"""Rotary position embedding in Triton: one program for each token rotates all its heads, of queries and of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, power_of_two, start
from halftune_kernels.ops.rope.call import Call
from halftune_kernels.ops.rope.reference import FORMS

_TILE = 2048  # pairs of a tile


@triton.jit
def _rotate_heads(
    x, out, batch_stride, head_stride, token_stride, column_stride, batch, place, token, c1, s1, c2, s2,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
    FORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """The heads of a token, N at a time; ``out`` is [B, T, H, D]. P pairs, E channels beyond R, padded."""
    pair = tl.arange(0, P)
    first = pair if FORM == 0 else 2 * pair
    second = pair + R // 2 if FORM == 0 else 2 * pair + 1
    source = x + tl.cast(batch, tl.int64) * batch_stride + tl.cast(place, tl.int64) * token_stride
    target = out + tl.cast(token, tl.int64) * (H * D)
    for begin in range(0, H, N):
        head = begin + tl.arange(0, N)
        inside = (head < H)[:, None] & (pair < R // 2)[None, :]
        row = source + tl.cast(head, tl.int64)[:, None] * head_stride  # heads may be apart by a whole long sequence
        into = target + head[:, None] * D
        a = tl.load(row + first[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + second[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32)
        if INVERSE:
            y = a * c1 + b * s2
            z = b * c2 - a * s1
        else:
            y = a * c1 - b * s1
            z = b * c2 + a * s2
        tl.store(into + first[None, :], y.to(out.dtype.element_ty), mask=inside)
        tl.store(into + second[None, :], z.to(out.dtype.element_ty), mask=inside)
        if R < D:
            rest = R + tl.arange(0, E)
            kept = (head < H)[:, None] & (rest < D)[None, :]
            same = tl.load(row + rest[None, :] * column_stride, mask=kept, other=0.0)
            tl.store(into + rest[None, :], same.to(out.dtype.element_ty), mask=kept)


@triton.jit
def rotate_tokens(
    q, k, cos, sin, q_out, k_out, length, table_stride,
    q_batch, q_head, q_token, q_column, k_batch, k_head, k_token, k_column,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    NQ: tl.constexpr, NK: tl.constexpr, E: tl.constexpr, FORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One token of B·T; ``table_stride`` is 0 where all rows share the tables."""
    token = tl.program_id(0)
    batch, place = token // length, token % length
    pair = tl.arange(0, P)
    fits = pair < R // 2
    first = pair if FORM != 1 else 2 * pair
    second = pair + R // 2 if FORM == 0 else (2 * pair + 1 if FORM == 1 else pair)
    at = tl.cast(batch, tl.int64) * table_stride + tl.cast(place, tl.int64) * R
    c1 = tl.load(cos + at + first, mask=fits, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + at + first, mask=fits, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + at + second, mask=fits, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + at + second, mask=fits, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        q, q_out, q_batch, q_head, q_token, q_column, batch, place, token, c1, s1, c2, s2,
        HQ, D, R, P, NQ, E, FORM, INVERSE,
    )  # fmt: skip
    _rotate_heads(
        k, k_out, k_batch, k_head, k_token, k_column, batch, place, token, c1, s1, c2, s2,
        HK, D, R, P, NK, E, FORM, INVERSE,
    )  # fmt: skip


def rotate(call: Call, out: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Writes both, rotated, to ``out``, transposed views of [B, T, H, D]."""
    q, k, cos, sin = call.q, call.k, call.cos.contiguous(), call.sin.contiguous()
    (batch, heads, length, width), rotated = q.shape, cos.shape[-1]
    pairs = power_of_two(rotated // 2)
    most = max(1, _TILE // pairs)
    sizes = {"HQ": heads, "HK": k.shape[1], "D": width, "R": rotated, "P": pairs}
    sizes |= {"NQ": min(most, power_of_two(heads, 1)), "NK": min(most, power_of_two(k.shape[1], 1))}
    sizes |= {"E": power_of_two(width - rotated) if rotated < width else 1}
    how = {"FORM": FORMS.index(call.form), "INVERSE": call.inverse}
    table = 0 if cos.shape[0] == 1 else cos.stride(0)
    given = q, k, cos, sin, *out, length, table, *q.stride(), *k.stride()
    start(rotate_tokens, (batch * length,), Config(pairs, 4, 1), *given, **sizes, **how)
