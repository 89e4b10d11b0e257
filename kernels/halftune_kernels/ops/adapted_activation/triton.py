"""Gated activations between low-rank updates in Triton: one launch forward, one backward. Formulas: ``reference.py``.

Forward, a program has some rows and goes through its part of the columns, so that ``y A_dᵀ`` stays in registers;
backward it has some columns and goes through its part of the rows, so that the gradients of the factors do. The parts'
sums are added afterwards, in a fixed order. Both wait for memory: the next tiles are read while one is computed, and a
tile's addresses are one 64-bit number and 32-bit distances, which leaves registers for more programs at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, capability, ceil_div, channels_together, dot_precision, power_of_two, start
from halftune_kernels.ops.adapted_activation.call import Call
from halftune_kernels.ops.gated_activation.triton import KINDS, act_and_slope

_PROGRAMS = 1024  # at least, if there is as much to do
# Rows and columns of a tile; of large ranks and fp32. On an H200, at the sizes of a 7B layer, the fastest of 138 cuts.
_FORWARD, _BACKWARD, _SMALL = (64, 64), (32, 64), (32, 32)
_WARPS = 4
_LARGE = 128 << 10  # bytes of shared memory; with less, three stages would leave room for one program at a time


@triton.jit
def adapted_forward(
    gate, up, low, b_gate, b_up, a_down, out, partial, rows, gate_scale, up_scale, gate_stride, up_stride, tiles,
    C: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """M rows, ``tiles`` tiles of S columns of C; partial [parts, rows, RD] gets their sum of ``y A_dᵀ``.

    EVEN: the tiles of all parts have C columns together.
    """
    block, begin = tl.cast(tl.program_id(0) * M, tl.int64), tl.program_id(1) * tiles * S
    line, along, rank = tl.arange(0, M)[:, None], tl.arange(0, S), tl.arange(0, R)
    known = tl.program_id(0) * M + line < rows
    dtype = gate.dtype.element_ty
    side = low + block * (RG + RU) + (line * (RG + RU) + rank[None, :])
    of_gate = tl.load(side, mask=known & (rank < RG)[None, :], other=0.0)
    of_up = tl.load(side + RG, mask=known & (rank < RU)[None, :], other=0.0)
    gate += block * gate_stride + begin
    up += block * up_stride + begin
    out += block * C + begin
    b_gate, b_up, a_down = b_gate + begin * RG, b_up + begin * RU, a_down + begin
    summed = tl.zeros((M, R), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        step = tile * S
        fits = begin + step + along < (begin + step + S if EVEN else C)
        inside = known if EVEN else known & fits[None, :]
        z = tl.load(gate + step + (line * gate_stride + along[None, :]), mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + step + (line * up_stride + along[None, :]), mask=inside, other=0.0).to(tl.float32)
        has_gate, has_up = fits[None, :] & (rank < RG)[:, None], fits[None, :] & (rank < RU)[:, None]
        bg = tl.load(b_gate + step * RG + (along[None, :] * RG + rank[:, None]), mask=has_gate, other=0.0)
        bu = tl.load(b_up + step * RU + (along[None, :] * RU + rank[:, None]), mask=has_up, other=0.0)
        z += gate_scale * tl.dot(of_gate, bg.to(dtype), input_precision=PRECISION)
        u += up_scale * tl.dot(of_up, bu.to(dtype), input_precision=PRECISION)
        acted, _ = act_and_slope(z, KIND)  # type: ignore[misc]
        y = (acted * u).to(dtype)
        tl.store(out + step + (line * C + along[None, :]), y, mask=inside)
        has_down = fits[:, None] & (rank < RD)[None, :]
        a = tl.load(a_down + step + (rank[None, :] * C + along[:, None]), mask=has_down, other=0.0)
        summed += tl.dot(y, a.to(dtype), input_precision=PRECISION)
    into = partial + (tl.cast(tl.program_id(1), tl.int64) * rows + block) * RD + (line * RD + rank[None, :])
    tl.store(into, summed, mask=known & (rank < RD)[None, :])


@triton.jit
def adapted_backward(
    grad, grad_low, gate, up, low, b_gate, b_up, a_down, dgate, dup, of_gate, of_up, of_down,
    rows, gate_scale, up_scale, grad_stride, gate_stride, up_stride, dgate_stride, dup_stride, tiles,
    C: tl.constexpr, RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr,
    R: tl.constexpr, M: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """S columns, ``tiles`` tiles of M rows; of_… [parts, C, R] and [parts, RD, C] get their sums for the factors.

    Results may go where gate and up are: a program writes only to tiles that it has read, and reads no tile twice.
    EVEN: S divides C.
    """
    begin, part = tl.program_id(0) * S, tl.cast(tl.program_id(1), tl.int64)
    line, along, rank = tl.arange(0, M), tl.arange(0, S)[None, :], tl.arange(0, R)
    here, column = line[:, None], begin + along
    fits = column < (begin + S if EVEN else C)
    dtype = gate.dtype.element_ty
    has_gate, has_up, has_down = (rank < RG)[:, None], (rank < RU)[:, None], (rank < RD)[:, None]
    at_gate, at_up = column * RG + rank[:, None], column * RU + rank[:, None]
    at_down = rank[:, None] * C + column
    bg = tl.load(b_gate + at_gate, mask=fits & has_gate, other=0.0).to(dtype)
    bu = tl.load(b_up + at_up, mask=fits & has_up, other=0.0).to(dtype)
    ad = tl.load(a_down + at_down, mask=fits & has_down, other=0.0).to(dtype)
    sum_gate = tl.zeros((R, S), tl.float32)
    sum_up = tl.zeros((R, S), tl.float32)
    sum_down = tl.zeros((R, S), tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = (tl.program_id(1) * tiles + tile) * M
        block, known = tl.cast(row, tl.int64), row + line < rows
        inside = known[:, None] if EVEN else known[:, None] & fits
        at_z, at_u = here * gate_stride + along, here * up_stride + along
        z = tl.load(gate + (block * gate_stride + begin) + at_z, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + (block * up_stride + begin) + at_u, mask=inside, other=0.0).to(tl.float32)
        at_g = here * grad_stride + along
        g = tl.load(grad + (block * grad_stride + begin) + at_g, mask=inside, other=0.0).to(tl.float32)
        # each side twice: as it is, and with rows and columns exchanged, for the products over rows
        sides, downs = low + block * (RG + RU), grad_low + block * RD
        side, down = here * (RG + RU) + rank[None, :], here * RD + rank[None, :]
        lg = tl.load(sides + side, mask=known[:, None] & (rank < RG)[None, :], other=0.0)
        lu = tl.load(sides + RG + side, mask=known[:, None] & (rank < RU)[None, :], other=0.0)
        gl = tl.load(downs + down, mask=known[:, None] & (rank < RD)[None, :], other=0.0)
        turned, down_t = line[None, :] * (RG + RU) + rank[:, None], line[None, :] * RD + rank[:, None]
        lg_t = tl.load(sides + turned, mask=known[None, :] & has_gate, other=0.0)
        lu_t = tl.load(sides + RG + turned, mask=known[None, :] & has_up, other=0.0)
        gl_t = tl.load(downs + down_t, mask=known[None, :] & has_down, other=0.0)
        z += gate_scale * tl.dot(lg, bg, input_precision=PRECISION)
        u += up_scale * tl.dot(lu, bu, input_precision=PRECISION)
        g += tl.dot(gl, ad, input_precision=PRECISION)
        acted, slope = act_and_slope(z, KIND)  # type: ignore[misc]
        dz = (g * u * slope).to(dtype)
        du = (g * acted).to(dtype)
        tl.store(dgate + (block * dgate_stride + begin) + (here * dgate_stride + along), dz, mask=inside)
        tl.store(dup + (block * dup_stride + begin) + (here * dup_stride + along), du, mask=inside)
        sum_gate += tl.dot(lg_t, dz, input_precision=PRECISION)
        sum_up += tl.dot(lu_t, du, input_precision=PRECISION)
        sum_down += tl.dot(gl_t, (acted * u).to(dtype), input_precision=PRECISION)
    tl.store(of_gate + part * C * RG + at_gate, gate_scale * sum_gate, mask=fits & has_gate)
    tl.store(of_up + part * C * RU + at_up, up_scale * sum_up, mask=fits & has_up)
    tl.store(of_down + part * C * RD + at_down, sum_down, mask=fits & has_down)


def _parts(others: int, tiles: int) -> tuple[int, int]:
    """Parts of ``tiles`` tiles and the tiles of each, beside ``others`` programs."""
    each = max(1, ceil_div(tiles, max(1, ceil_div(_PROGRAMS, max(others, 1)))))
    return ceil_div(tiles, each), each


def _how(call: Call, tile: tuple[int, int]) -> tuple[dict, Config]:
    ranks = call.b_gate.shape[1], call.b_up.shape[1], call.a_down.shape[0]
    rows, columns = tile if max(ranks) <= 32 and call.gate.element_size() == 2 else _SMALL
    found = {"C": call.gate.shape[1], "RG": ranks[0], "RU": ranks[1], "RD": ranks[2], "R": power_of_two(max(ranks))}
    found |= {"M": rows, "S": columns, "KIND": KINDS[call.activation], "PRECISION": dot_precision(call.gate.dtype)}
    stages = 3 if SHARED_MEMORY.get(capability(call.gate.device), 0) > _LARGE else 2
    return found | {"STAGES": stages}, Config(columns, _WARPS, stages)


def _operands(call: Call) -> tuple[torch.Tensor, ...]:
    """Gate and up with channels side by side; the rest contiguous."""
    return (
        channels_together(call.gate),
        channels_together(call.up),
        *(one.contiguous() for one in (call.low, *call[3:6])),
    )


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` ``[T, M]``, contiguous, and ``y A_dᵀ``."""
    how, config = _how(call, _FORWARD)
    gate, up, *others = _operands(call)
    rows, width = gate.shape
    count = ceil_div(rows, how["M"])
    parts, tiles = _parts(count, ceil_div(width, how["S"]))
    out = gate.new_empty(gate.shape)
    partial = gate.new_empty(parts, rows, how["RD"], dtype=torch.float32)
    numbers = rows, call.gate_scale, call.up_scale, gate.stride(0), up.stride(0), tiles
    how["EVEN"] = parts * tiles * how["S"] == width
    start(adapted_forward, (count, parts), config, gate, up, *others, out, partial, *numbers, **how)
    return out, partial.sum(0).to(gate.dtype)


def backward(
    grad: torch.Tensor, grad_low: torch.Tensor, call: Call, into: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the gradients of gate and up; returns those of both B and of A, in fp32."""
    how, config = _how(call, _BACKWARD)
    grad, grad_low, (gate, up, *others) = channels_together(grad), grad_low.contiguous(), _operands(call)
    assert all(x.stride(1) == 1 for x in into), "channels side by side"
    (rows, width), columns = gate.shape, ceil_div(gate.shape[1], how["S"])
    parts, tiles = _parts(columns, ceil_div(rows, how["M"]))
    shapes = (width, how["RG"]), (width, how["RU"]), (how["RD"], width)
    partial = [gate.new_empty(parts, *shape, dtype=torch.float32) for shape in shapes]
    numbers = rows, call.gate_scale, call.up_scale, *(x.stride(0) for x in (grad, gate, up, *into)), tiles
    how["EVEN"] = width % how["S"] == 0
    given = grad, grad_low, gate, up, *others, *into, *partial, *numbers
    start(adapted_backward, (columns, parts), config, *given, **how)
    of_gate, of_up, of_down = (one.sum(0) for one in partial)
    return of_gate, of_up, of_down
