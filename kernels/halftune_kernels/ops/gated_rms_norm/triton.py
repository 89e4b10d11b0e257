"""Gated RMSNorm in Triton: one launch forward, one backward and a sum over its programs. Formulas: see ``cpu.py``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from halftune_kernels.launch import Config, ceil_div, power_of_two, start
from halftune_kernels.ops.gated_rms_norm import GatedNorm

_PROGRAMS = 512  # backward programs: each sums its rows' gradient of the weight, so this many partial sums are added
_TILE = 2048  # elements of a program's tile


def gated_rms_norm(call: GatedNorm) -> torch.Tensor:
    """See `halftune_kernels.ops.gated_rms_norm.gated_rms_norm`; x is [M, D]."""
    return _GatedNorm.apply(*call)


@triton.jit
def _factor(z, SIGMOID: tl.constexpr):
    s = 1.0 / (1.0 + tl.exp(-z))
    return s if SIGMOID else z * s


@triton.jit
def _factor_slope(z, SIGMOID: tl.constexpr):
    s = 1.0 / (1.0 + tl.exp(-z))
    return s * (1.0 - s) if SIGMOID else s * (1.0 + z * (1.0 - s))


@triton.jit
def norm_forward(
    x, weight, gate, y, rows, eps,
    D: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of M rows of one group of SIZE channels."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * SIZE + tl.arange(0, S)
    inside = (row < rows)[:, None] & (tl.arange(0, S) < SIZE)[None, :]
    at = tl.cast(row, tl.int64)[:, None] * D + column[None, :]
    u = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=tl.arange(0, S) < SIZE, other=0.0).to(tl.float32)
    if gate is not None:
        f = _factor(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32), SIGMOID)
        if not FIRST:
            u = u * f
    r = 1.0 / tl.sqrt(tl.sum(u * u, 1) / SIZE + eps)
    out = u * r[:, None] * w[None, :]
    if gate is not None and FIRST:
        out = out * f
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    x, weight, gate, dy, dx, dgate, partial, rows, eps, tiles,
    D: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """``tiles`` tiles of M rows of one group; partial [programs, D] gets their sum for the weight."""
    column = tl.program_id(1) * SIZE + tl.arange(0, S)
    fits = tl.arange(0, S) < SIZE
    w = tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)
    total = tl.zeros((S,), tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0) * tiles + tile) * M + tl.arange(0, M)
        inside = (row < rows)[:, None] & fits[None, :]
        at = tl.cast(row, tl.int64)[:, None] * D + column[None, :]
        u = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        inner = u
        if gate is not None:
            z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            f = _factor(z, SIGMOID)
            if not FIRST:
                inner = u * f
        r = (1.0 / tl.sqrt(tl.sum(inner * inner, 1) / SIZE + eps))[:, None]
        n = inner * r
        dn = a * w[None, :]
        if gate is not None and FIRST:
            slope = dn * n * _factor_slope(z, SIGMOID)
            tl.store(dgate + at, slope.to(dgate.dtype.element_ty), mask=inside)
            dn = dn * f
            a = a * f
        total += tl.sum(tl.where(inside, a * n, 0.0), 0)
        du = (dn - n * (tl.sum(dn * n, 1) / SIZE)[:, None]) * r
        if gate is not None and not FIRST:
            slope = du * u * _factor_slope(z, SIGMOID)
            tl.store(dgate + at, slope.to(dgate.dtype.element_ty), mask=inside)
            du = du * f
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + tl.cast(tl.program_id(0), tl.int64) * D + column, total, mask=fits)


def _cut(size: int) -> tuple[int, int, Config]:
    """Padded group, rows of a tile, configuration."""
    padded = power_of_two(size)
    return padded, max(1, _TILE // padded), Config(padded, 8 if padded > 4096 else 4, 1)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        x, weight, gate, eps, sigmoid, norm_before_gate, group_size = GatedNorm(*call)
        x, weight = x.contiguous(), weight.contiguous()
        gate = None if gate is None else gate.contiguous()
        rows, channels = x.shape
        y = torch.empty_like(x)
        padded, tall, config = _cut(group_size)
        grid = (ceil_div(rows, tall), channels // group_size)
        how = {"D": channels, "SIZE": group_size, "S": padded, "M": tall, "SIGMOID": sigmoid, "FIRST": norm_before_gate}
        start(norm_forward, grid, config, x, weight, gate, y, rows, eps, **how)
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.how = eps, how
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        how, rows = ctx.how, len(x)
        _, tall, config = _cut(how["SIZE"])
        count = ceil_div(rows, tall)
        tiles = ceil_div(count, _PROGRAMS)
        programs = ceil_div(count, tiles) if count else 0
        dx, dgate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        partial = x.new_empty(programs, how["D"], dtype=torch.float32)
        grid = (programs, how["D"] // how["SIZE"])
        dy = dy.contiguous()
        start(norm_backward, grid, config, x, weight, gate, dy, dx, dgate, partial, rows, ctx.eps, tiles, **how)
        return dx, partial.sum(0).to(weight.dtype), dgate, None, None, None, None
