"""Root-mean-square normalisation in Triton: one launch forward, one backward. Formulas: see ``cpu.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, ceil_div, channels_together, power_of_two, start
from halftune_kernels.ops.rms_norm.cpu import Norm

_PROGRAMS = 512  # of the backward pass with a trained weight: as many partial sums are added
_TILE = 2048  # elements of a program's tile


@triton.jit
def norm_forward(
    x, weight, y, inverse, rows, eps, offset, stride,
    H: tl.constexpr, S: tl.constexpr, M: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """One tile of M rows, ``stride`` elements apart in ``x``."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, S)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    source = tl.cast(row, tl.int64)[:, None] * stride + column[None, :]
    at = tl.cast(row, tl.int64)[:, None] * H + column[None, :]
    u = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32) + offset
    r = 1.0 / tl.sqrt(tl.sum(u * u, 1) / H + eps)
    tl.store(inverse + row, r, mask=row < rows)
    n = u * r[:, None]
    if ROUNDS:
        n = n.to(x.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (n * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    x, weight, inverse, dy, dx, partial, rows, offset, stride, tiles,
    H: tl.constexpr, S: tl.constexpr, M: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """``tiles`` tiles of M rows; partial [programs, H] gets their sum for the weight, unless None, as dx may be."""
    column = tl.arange(0, S)
    w = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32) + offset
    summed = tl.zeros((S,), tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0) * tiles + tile) * M + tl.arange(0, M)
        inside = (row < rows)[:, None] & (column < H)[None, :]
        at = tl.cast(row, tl.int64)[:, None] * H + column[None, :]
        source = tl.cast(row, tl.int64)[:, None] * stride + column[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        n = tl.load(x + source, mask=inside, other=0.0).to(tl.float32) * r
        if partial is not None:
            kept = n
            if ROUNDS:
                kept = n.to(x.dtype.element_ty).to(tl.float32)
            summed += tl.sum(g * kept, 0)
        if dx is not None:
            a = g * w[None, :]
            d = (a - n * (tl.sum(a * n, 1) / H)[:, None]) * r
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + tl.cast(tl.program_id(0), tl.int64) * H + column, summed, mask=column < H)


def _cut(width: int) -> tuple[int, int, Config]:
    """Padded row, rows of a tile, configuration."""
    padded = power_of_two(width)
    return padded, max(1, _TILE // padded), Config(padded, min(16, max(4, padded // 1024)), 1)


def forward(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm ``[T, H]``, and 1 / root mean square ``[T, 1]``."""
    x, (rows, width) = channels_together(x), x.shape
    y, inverse = x.new_empty(x.shape, dtype=norm.dtype), x.new_empty(rows, 1, dtype=torch.float32)
    padded, tall, config = _cut(width)
    how = {"H": width, "S": padded, "M": tall, "ROUNDS": norm.rounds}
    given = x, norm.weight.contiguous(), y, inverse
    start(norm_forward, (ceil_div(rows, tall),), config, *given, rows, norm.eps, norm.offset, x.stride(0), **how)
    return y, inverse


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    norm: Norm,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the rows and of the weight; None where not wanted."""
    x, (rows, width) = channels_together(x), x.shape
    padded, tall, config = _cut(width)
    count = ceil_div(rows, tall)
    tiles = ceil_div(count, _PROGRAMS) if wanted[1] else min(count, 1)
    programs = ceil_div(count, tiles) if count else 0
    dx = x.new_empty(x.shape) if wanted[0] else None
    partial = x.new_empty(programs, width, dtype=torch.float32) if wanted[1] else None
    how = {"H": width, "S": padded, "M": tall, "ROUNDS": norm.rounds}
    given = x, norm.weight.contiguous(), inverse, grad.contiguous(), dx, partial
    start(norm_backward, (programs,), config, *given, rows, norm.offset, x.stride(0), tiles, **how)
    return dx, None if partial is None else partial.sum(0).to(norm.weight.dtype)
