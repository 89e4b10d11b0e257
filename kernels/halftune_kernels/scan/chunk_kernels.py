"""What the Triton kernels of chunked recurrences share: where a program works, what it loads and stores, and decays.

Kernels come in two kinds: a program of one chunk and head, for all that does not depend on the state, and a scan, whose
program goes through the chunks of one segment and head with a tile of the state.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-160.0)  # of a step's log2 decay: exp2 of it is 0 in fp32


@triton.jit
def decay_sums(g, live):
    """Inclusive sums of the log2 decays of a chunk's rows, each as an fp32 number and what its rounding left.

    Without the second a fast decay would cost the digits of every slower decay after it. Whole numbers are summed by
    themselves, which is exact. A step counts down to `LEAST` only, minus infinity too: exp2 of less is 0 anyway."""
    decay = tl.load(g, mask=live, other=0.0).to(tl.float32) * LOG2E
    decay = tl.where(decay < LEAST, LEAST, decay)
    whole = tl.floor(decay + 0.5)
    part, whole = tl.cumsum(decay - whole, 0), tl.cumsum(whole, 0)
    total = whole + part
    added = total - whole
    return total, (whole - (total - added)) + (part - added)


@triton.jit
def load_sums(b, f, at, live, PARTS: tl.constexpr):
    """The two parts of `decay_sums`; 0 where not ``live``.

    Without ``PARTS`` the second is left out, in half: products round more there, and the registers are short."""
    sums, parts = tl.load(b + at, mask=live, other=0.0), tl.zeros(live.shape, tl.float32)
    if PARTS:
        parts = tl.load(f + at, mask=live, other=0.0)
    return sums, parts


@triton.jit
def pair_decays(b, f, keep):
    """exp2 of the decay from column j through row i [C, C] by the two parts of `decay_sums`; 0 where not ``keep``."""
    apart = (b[:, None] - b[None, :]) + (f[:, None] - f[None, :])
    return tl.exp2(tl.where(keep, apart, float("-inf")))


@triton.jit
def state_decays(sums, parts, b, f, row, left, live, HV: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """exp2 of the decay through each row and after each row [C], 0 where there is none, and of the whole chunk."""
    end = row + (tl.minimum(C, left) - 1) * HV
    last, last_part = tl.load(b + end), 0.0
    if PARTS:
        last_part = tl.load(f + end)
    after = tl.where(live, tl.exp2((last - sums) + (last_part - parts)), 0.0)
    return tl.exp2(sums + parts), after, tl.exp2(last + last_part)


@triton.jit
def between(pairs, C: tl.constexpr):
    """What the decay of each row t has of pairs [C, C] of rows: those with i >= t > j, which it stands between.

    Summed over these alone: all rows' sums less all columns' would be the same number only up to the rounding of what
    cancels, and that is large beside a small gradient."""
    c = tl.arange(0, C)
    apart = tl.where(c[:, None] > c[None, :], pairs, 0.0)
    return tl.sum(tl.where(c[:, None] > c[None, :], tl.cumsum(apart, 0, reverse=True), 0.0), 1)


@triton.jit
def decay_gradient(dgate, through, after, held, C: tl.constexpr):
    """``dgate`` with what the decay of each row t has of the state that enters: of ``through`` of the rows i >= t, of
    ``after`` of the rows j < t, and ``held`` of the whole state."""
    c = tl.arange(0, C)
    dgate += tl.cumsum(through, 0, reverse=True) + held
    return dgate + tl.sum(tl.where(c[:, None] > c[None, :], after[None, :], 0.0), 1)


@triton.jit
def chunk_decays(b, f, now, HV: tl.constexpr, C: tl.constexpr):
    """`state_decays` of a chunk of a scan."""
    sums, parts = load_sums(b, f, now.by_row, now.live, True)
    return state_decays(sums, parts, b, f, now.row, now.left, now.live, HV, C, True)


@triton.jit
def chunk_place(table, H: tl.constexpr, HV: tl.constexpr, C: tl.constexpr):
    """Of a program of one chunk and head: its first row in [rows, HV], that of its keys in [rows, H], and the segment's
    rows from there on."""
    entry, head = table + tl.program_id(0) * 4, tl.program_id(1)
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    base = tl.cast(first + place * C, tl.int64)
    return base * HV + head, base * H + head // (HV // H), length - place * C


@triton.jit
def chunk_number(HV: tl.constexpr):
    """Of a program of one chunk and head: its place in [chunks, HV]."""
    return tl.cast(tl.program_id(0), tl.int64) * HV + tl.program_id(1)


class Scan(NamedTuple):
    """What the program of a scan computes: a tile of the values, of one head and segment."""

    part: tl.tensor  # which tile
    head: tl.tensor
    segment: tl.tensor
    chunk: tl.tensor  # number of its first chunk
    first: tl.tensor  # row
    length: tl.tensor  # rows
    kk: tl.tensor  # channels of the keys, all
    vv: tl.tensor  # and of the values, those of the tile


@triton.jit
def begin_scan(
    table, states, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What this program computes, and the state it begins with.

    All on the first axis of the grid, for the others end at 65,535, and a batch or a packed row may hold more
    samples."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    number = tl.program_id(0)
    part, head, entry = number % tiles, number // tiles % HV, table + number // (tiles * HV) * 4
    segment, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    here = Scan(part, head, segment, chunk, first, length, tl.arange(0, BK), part * BV + tl.arange(0, BV))
    return here, load_state(states, segment, here, HV, K, V)


class Tile(NamedTuple):
    """A tile of a chunk as it was read, and where it is read again."""

    value: tl.tensor
    x: tl.tensor
    at: tl.tensor
    keep: tl.tensor


@triton.jit
def load_tile(x, at, keep):
    """A tile of a chunk, for `at_hand`; 0 where not ``keep``."""
    return Tile(tl.load(x + at, mask=keep, other=0.0), x, at, keep)


@triton.jit
def at_hand(tile, PRECISION: tl.constexpr):
    """``tile`` for a product now.

    In half all tiles of a chunk are read at the top of the loop, which waits for them once. In fp32 they would be more
    than the registers hold, each split in two for tf32x3: there each is read here, and the compiler drops the read
    above."""
    value = tile.value
    if PRECISION == "tf32x3":
        value = tl.load(tile.x + tile.at, mask=tile.keep, other=0.0)
    return value


class Chunk(NamedTuple):
    """One chunk of a scan: offsets of its rows, and which of them exist."""

    number: tl.tensor
    left: tl.tensor  # rows from here to the segment's end
    row: tl.tensor  # the first one in [rows, HV]
    by_row: tl.tensor  # all
    by_key: tl.tensor  # in [rows, H]
    live: tl.tensor
    at_k: tl.tensor  # in [rows, H, K]
    in_k: tl.tensor
    at_v: tl.tensor  # in [rows, HV, V], of the tile
    in_v: tl.tensor
    at_c: tl.tensor  # in [rows, HV, C]
    in_c: tl.tensor


@triton.jit
def scan_chunk(
    here, place, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Chunk ``place`` of the segment of a scan.

    The scan loads the tiles itself: each in another order, for a change of it costs some of them 50 registers."""
    base, left, c = tl.cast(here.first + place * C, tl.int64), here.length - place * C, tl.arange(0, C)
    row, key = base * HV + here.head, base * H + here.head // (HV // H)
    live = place * C + c < here.length  # c < left is the same, but compiles to 254 registers where 176 do
    at_k, in_k = key * K + c[:, None] * (H * K) + here.kk[None, :], live[:, None] & (here.kk < K)[None, :]
    at_v, in_v = row * V + c[:, None] * (HV * V) + here.vv[None, :], live[:, None] & (here.vv < V)[None, :]
    at_c, in_c = row * C + c[:, None] * (HV * C) + c[None, :], live[:, None]
    by_row, by_key = row + c * HV, key + c * H
    return Chunk(here.chunk + place, left, row, by_row, by_key, live, at_k, in_k, at_v, in_v, at_c, in_c)


@triton.jit
def tile_at(row, live, kk, H: tl.constexpr, K: tl.constexpr):
    """Offsets of channels kk of rows of one head in [rows, H, K], and which of them exist."""
    return row[:, None] * (H * K) + kk[None, :], live[:, None] & (kk < K)[None, :]


@triton.jit
def load_rows(x, row, live, kk, H: tl.constexpr, K: tl.constexpr):
    """Channels kk of rows of one head, as they are; 0 where there is none."""
    at, inside = tile_at(row, live, kk, H, K)
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def row_factor(x, at, live):
    """One number per row of a chunk, fp32; 1 where there are none."""
    value = tl.full(live.shape, 1.0, tl.float32)
    if x is not None:
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    return value


@triton.jit
def load_state(states, number, here, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """The tile [k, v] of state ``number`` that a scan begins with; zeros if there are none."""
    at, inside = tile_at(here.kk, here.kk < K, here.vv, 1, V)
    state = tl.zeros(at.shape, tl.float32)
    if states is not None:
        state += tl.load(states + (tl.cast(number, tl.int64) * HV + here.head) * K * V + at, mask=inside, other=0.0)
    return state


@triton.jit
def store_state(states, number, here, state, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Stores what `load_state` loads, if there are states."""
    if states is not None:
        at, inside = tile_at(here.kk, here.kk < K, here.vv, 1, V)
        into = states + (tl.cast(number, tl.int64) * HV + here.head) * K * V + at
        tl.store(into, state.to(states.dtype.element_ty), mask=inside)
