"""Short causal convolution in Triton: one launch forward; backward one for the convolution's own gradient and the sums
for weight and bias, one for the input. Samples are told apart by a table of chunks of rows; nothing is padded."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments, chunk_table
from halftune_kernels.launch import Config, capability, ceil_div, power_of_two, start
from halftune_kernels.ops.causal_conv1d import Convolution

ROWS = 16  # of a tile of 16 x 32 elements; with 64 columns the backward kernel spills on Blackwell
TILES = 8  # of a program


def _config(x: torch.Tensor) -> Config:
    """In half, ptxas stops at 128 registers for sm_80 to sm_89 and spills; with 8 warps it needs 71 there."""
    return Config(32, 8 if x.dtype != torch.float32 and 80 <= capability(x.device) < 90 else 4, 1)


def causal_conv1d(call: Convolution) -> torch.Tensor:
    """See `halftune_kernels.ops.causal_conv1d.causal_conv1d_fn`; x is [B, T, D] here."""
    return _CausalConv.apply(*call)


@triton.jit
def _tap(x, states, row, shift, n, length, d, R: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Inputs ``shift`` rows before a tile's, which begins at ``row`` of its segment; x is the tile's first row.

    What comes before the segment is its initial state, or zero.
    """
    fits = (d < D)[None, :]
    local = tl.arange(0, R) - shift
    t = row + local
    inside = (t >= 0) & (t < length)
    value = tl.load(x + local[:, None] * D + d[None, :], mask=inside[:, None] & fits, other=0.0).to(tl.float32)
    if states is not None:
        before = (t < 0) & (t >= 1 - W)
        at = (tl.cast(n, tl.int64) * D + d)[None, :] * (W - 1) + (t + W - 1)[:, None]
        value += tl.load(states + at, mask=before[:, None] & fits, other=0.0).to(tl.float32)
    return value


@triton.jit
def _window(x, weight, bias, states, row, n, length, d, R: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """The convolution of a tile before its activation, [R, channels], fp32."""
    fits = d < D
    z = tl.zeros((R, d.shape[0]), tl.float32)
    if bias is not None:
        z += tl.load(bias + d, mask=fits, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        w = tl.load(weight + d * W + tap, mask=fits, other=0.0).to(tl.float32)
        z += _tap(x, states, row, W - 1 - tap, n, length, d, R, D, W) * w[None, :]
    return z


@triton.jit
def conv_forward(
    x, weight, bias, states, y, table,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """TILES tiles of R rows of one segment, BD channels."""
    entry = table + tl.program_id(0) * 4
    n, place, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = tl.arange(0, R)[:, None] * D + d[None, :]
    for tile in range(tl.minimum(TILES, tl.cdiv(length - place * TILES * R, R))):
        row = (place * TILES + tile) * R
        t, origin = row + tl.arange(0, R), tl.cast(first + row, tl.int64) * D
        z = _window(x + origin, weight, bias, states, row, n, length, d, R, D, W)
        if SILU:
            z = z / (1.0 + tl.exp(-z))
        inside = (t < length)[:, None] & (d < D)[None, :]
        tl.store(y + origin + at, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def conv_backward(
    x, weight, bias, states, dy, dz, partial, table,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """dz of the rows; partial [programs, W + 1, D] gets their sums for the weight and, last, the bias."""
    entry = table + tl.program_id(0) * 4
    n, place, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = tl.arange(0, R)[:, None] * D + d[None, :]
    which = tl.arange(0, SUMS)[:, None]
    sums = tl.zeros((SUMS, BD), tl.float32)
    for tile in range(tl.minimum(TILES, tl.cdiv(length - place * TILES * R, R))):
        row = (place * TILES + tile) * R
        t, origin = row + tl.arange(0, R), tl.cast(first + row, tl.int64) * D
        inside = (t < length)[:, None] & (d < D)[None, :]
        slope = tl.load(dy + origin + at, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            z = _window(x + origin, weight, bias, states, row, n, length, d, R, D, W)
            s = 1.0 / (1.0 + tl.exp(-z))
            slope = slope * s * (1.0 + z * (1.0 - s))
        tl.store(dz + origin + at, slope, mask=inside)
        for tap in tl.static_range(W):
            value = _tap(x + origin, states, row, W - 1 - tap, n, length, d, R, D, W)
            sums += tl.where(which == tap, tl.sum(slope * value, 0)[None, :], 0.0)
        sums += tl.where(which == W, tl.sum(slope, 0)[None, :], 0.0)
    into = partial + tl.cast(tl.program_id(0), tl.int64) * (W + 1) * D + which * D + d[None, :]
    tl.store(into, sums, mask=(which <= W) & (d < D)[None, :])


@triton.jit
def conv_backward_input(
    dz, weight, dx, table,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx: each input was met by the next W outputs of its segment."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = tl.arange(0, R)[:, None] * D + d[None, :]
    for tile in range(tl.minimum(TILES, tl.cdiv(length - place * TILES * R, R))):
        row = (place * TILES + tile) * R
        t, origin = row + tl.arange(0, R), tl.cast(first + row, tl.int64) * D
        total = tl.zeros((R, BD), tl.float32)
        for tap in tl.static_range(W):
            shift = W - 1 - tap
            inside = (t + shift < length)[:, None] & (d < D)[None, :]
            w = tl.load(weight + d * W + tap, mask=d < D, other=0.0).to(tl.float32)
            total += tl.load(dz + origin + shift * D + at, mask=inside, other=0.0) * w[None, :]
        inside = (t < length)[:, None] & (d < D)[None, :]
        tl.store(dx + origin + at, total.to(dx.dtype.element_ty), mask=inside)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        x, weight, bias, silu, initial_states, segments = Convolution(*call)
        x, weight = x.contiguous(), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        states = None if initial_states is None else initial_states.contiguous()
        table = chunk_table(segments, ROWS * TILES, x.device)
        channels, width = weight.shape
        how = {"D": channels, "W": width, "R": ROWS, "TILES": TILES}
        config = _config(x)
        how["BD"] = min(config.width, power_of_two(channels))
        grid = (len(table), ceil_div(channels, how["BD"]))
        y = torch.empty_like(x)
        start(conv_forward, grid, config, x, weight, bias, states, y, table, SILU=silu, **how)
        ctx.save_for_backward(x, weight, bias, states)
        ctx.segments, ctx.silu, ctx.how, ctx.grid = segments, silu, how, grid
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, states = ctx.saved_tensors
        table, how, width = chunk_table(ctx.segments, ROWS * TILES, x.device), ctx.how, weight.shape[1]
        config = _config(x)
        dz = torch.empty_like(x, dtype=torch.float32)
        partial = x.new_empty(len(table), width + 1, x.shape[2], dtype=torch.float32)
        given = (x, weight, bias, states, dy.contiguous(), dz, partial, table)
        start(conv_backward, ctx.grid, config, *given, SILU=ctx.silu, SUMS=power_of_two(width + 1, 1), **how)
        dx = torch.empty_like(x)
        start(conv_backward_input, ctx.grid, config, dz, weight, dx, table, **how)
        sums = partial.sum(0)
        dbias = None if bias is None else sums[width].to(bias.dtype)
        dstates = None if states is None else _initial_gradient(dz, weight, states, ctx.segments)
        return dx, sums[:width].T.to(weight.dtype), dbias, None, dstates, None


def _initial_gradient(dz: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Column j of an initial state meets output j - i of its segment through tap i; few elements, so plain torch."""
    rows, width = dz.flatten(0, 1), weight.shape[1]
    total = torch.zeros_like(states, dtype=torch.float32)
    first = torch.tensor(segments.bounds[:-1], device=dz.device)
    lengths = torch.tensor(segments.lengths, device=dz.device)
    for column in range(width - 1):
        for tap in range(column + 1):
            at = column - tap
            met = rows[(first + at).clamp(max=len(rows) - 1)] * weight[:, tap].float()
            total[:, :, column] += torch.where((at < lengths)[:, None], met, 0.0)
    return total.to(states.dtype)
