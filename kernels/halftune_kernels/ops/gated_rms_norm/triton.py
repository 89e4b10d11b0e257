"""Gated RMSNorm in Triton: one launch forward, one backward and a sum over its programs. Formulas: see ``cpu.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, ceil_div, channels_together, power_of_two, start
from halftune_kernels.ops.gated_rms_norm.cpu import GatedNorm

_PROGRAMS = 512  # backward programs: each sums its rows' gradient of the weight, so this many partial sums are added
_TILE = 2048  # elements of a program's tile


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
    x, weight, gate, y, rows, eps, x_stride, gate_stride,
    D: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of M rows, ``x_stride`` and ``gate_stride`` elements apart, of one group of SIZE channels."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * SIZE + tl.arange(0, S)
    inside = (row < rows)[:, None] & (tl.arange(0, S) < SIZE)[None, :]
    far = tl.cast(row, tl.int64)[:, None]
    u = tl.load(x + far * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=tl.arange(0, S) < SIZE, other=0.0).to(tl.float32)
    if gate is not None:
        z = tl.load(gate + far * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        f = _factor(z, SIGMOID)
        if not FIRST:
            u = u * f
    r = 1.0 / tl.sqrt(tl.sum(u * u, 1) / SIZE + eps)
    out = u * r[:, None] * w[None, :]
    if gate is not None and FIRST:
        out = out * f
    tl.store(y + far * D + column[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    x, weight, gate, dy, dx, dgate, partial, rows, eps, tiles, x_stride, gate_stride,
    D: tl.constexpr, SIZE: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    SIGMOID: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """``tiles`` tiles of M rows of one group; partial [programs, D] gets their sum for the weight, unless None."""
    column = tl.program_id(1) * SIZE + tl.arange(0, S)
    fits = tl.arange(0, S) < SIZE
    w = tl.load(weight + column, mask=fits, other=0.0).to(tl.float32)
    total = tl.zeros((S,), tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0) * tiles + tile) * M + tl.arange(0, M)
        inside = (row < rows)[:, None] & fits[None, :]
        far = tl.cast(row, tl.int64)[:, None]
        at = far * D + column[None, :]
        u = tl.load(x + far * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        a = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        inner = u
        if gate is not None:
            z = tl.load(gate + far * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
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
        if partial is not None:
            total += tl.sum(tl.where(inside, a * n, 0.0), 0)
        du = (dn - n * (tl.sum(dn * n, 1) / SIZE)[:, None]) * r
        if gate is not None and not FIRST:
            slope = du * u * _factor_slope(z, SIGMOID)
            tl.store(dgate + at, slope.to(dgate.dtype.element_ty), mask=inside)
            du = du * f
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + tl.cast(tl.program_id(0), tl.int64) * D + column, total, mask=fits)


def _cut(size: int) -> tuple[int, int, Config]:
    """Padded group, rows of a tile, configuration."""
    padded = power_of_two(size)
    return padded, max(1, _TILE // padded), Config(padded, 8 if padded > 4096 else 4, 1)


def _how(call: GatedNorm) -> tuple[dict[str, int | bool], int, Config]:
    """Constants, rows of a tile, configuration."""
    padded, tall, config = _cut(call.group_size)
    how = {"D": call.x.shape[1], "SIZE": call.group_size, "S": padded, "M": tall}
    return how | {"SIGMOID": call.sigmoid, "FIRST": call.norm_before_gate}, tall, config


def forward(call: GatedNorm) -> torch.Tensor:
    """The norm [M, D]."""
    x, gate = channels_together(call.x), None if call.gate is None else channels_together(call.gate)
    (rows, channels), (how, tall, config) = x.shape, _how(call)
    y = torch.empty(x.shape, dtype=call.dtype, device=x.device)
    apart = x.stride(0), 0 if gate is None else gate.stride(0)
    grid = (ceil_div(rows, tall), channels // call.group_size)
    start(norm_forward, grid, config, x, call.weight.contiguous(), gate, y, rows, call.eps, *apart, **how)
    return y


def backward(dy: torch.Tensor, call: GatedNorm, wants_weight: bool) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, of the weight (None if not wanted) and of the gate (None without one)."""
    x, gate, weight = (
        channels_together(call.x),
        None if call.gate is None else channels_together(call.gate),
        call.weight.contiguous(),
    )
    (rows, channels), (how, tall, config) = x.shape, _how(call)
    count = ceil_div(rows, tall)
    tiles = ceil_div(count, _PROGRAMS) if wants_weight else min(count, 1)
    programs = ceil_div(count, tiles) if count else 0
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    partial = x.new_empty(programs, channels, dtype=torch.float32) if wants_weight else None
    given = x, weight, gate, dy.contiguous(), dx, dgate, partial
    apart = x.stride(0), 0 if gate is None else gate.stride(0)
    start(norm_backward, (programs, channels // call.group_size), config, *given, rows, call.eps, tiles, *apart, **how)
    return dx, None if partial is None else partial.sum(0).to(weight.dtype), dgate
