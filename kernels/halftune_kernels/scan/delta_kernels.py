"""Triton kernels that the operators of the delta family share; formulas stand with the operators.

A chunk of Kimi delta attention or of RWKV-7 is N = U + W S, O = Q S + P N [+ P2 V], S' = diag(e) S + Kᵀ N [+ K2ᵀ V],
with everything but S known for all chunks at once: the scans hold the state and form two products one after the other.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

import triton
import triton.language as tl

from halftune_kernels.scan.chunk_kernels import (
    LOG2E,
    at_hand,
    begin_scan,
    load_rows,
    load_sums,
    load_tile,
    row_factor,
    scan_chunk,
    store_state,
)


@triton.jit
def vector(x, norm, row, kk, H: tl.constexpr, K: tl.constexpr):
    """Channels of one row of a chunk, times its norm's inverse if there is one."""
    value = tl.load(x + row * (H * K) + kk, mask=kk < K, other=0.0).to(tl.float32)
    if norm is not None:
        value = value * tl.load(norm + row * H)
    return value


@triton.jit
def unit_inverse(low, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + low)^-1 for ``low`` [C, C] strictly lower, by halves: from the inverse of the diagonal blocks of s rows
    follows that of 2s rows, X - X E X with E the blocks between. Stable also for equal keys, where a power series would
    cancel."""
    c = tl.arange(0, C)
    pair = (c[:, None] // 2) == (c[None, :] // 2)
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0) - tl.where(pair, low, 0.0)
    size = 2
    for _ in tl.static_range(LEVELS):
        between = ((c[:, None] // (2 * size)) == (c[None, :] // (2 * size))) & (
            (c[:, None] // size) != (c[None, :] // size)
        )
        step = tl.dot(tl.where(between, low, 0.0), inverse, input_precision="ieee")
        inverse -= tl.dot(inverse, step, input_precision="ieee")
        size = size * 2
    return inverse


@triton.jit
def _exact(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _lower(a, factor, row: tl.constexpr, column: tl.constexpr, left, HV: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, 16)
    live = row * 16 + i < left
    at = (row * 16 + i)[:, None] * (HV * C) + (column * 16 + i)[None, :]
    keep = live[:, None] & ((row != column) | (i[:, None] > i[None, :]))
    return tl.load(a + at, mask=keep, other=0.0) * row_factor(factor, (row * 16 + i) * HV, live)[:, None]


@triton.jit
def store_inverse(
    t, b, f, d0, d1, d2, d3, a10, a20, a21, a30, a31, a32, left, HV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores (I + low)^-1 of a strictly lower [64, 64] matrix of a chunk with ``left`` rows, times exp2(b_i - b_j) if
    there is a b.

    By forward substitution over blocks [16, 16], whose products are small enough for the registers, column by column,
    each stored as soon as it is known.

    Args:
        t: where the matrix begins.
        b, f: where the two parts of the chunk's `decay_sums` begin, or None.
        d0, d1, d2, d3: inverses of the blocks of I + low on the diagonal.
        a10, a20, a21, a30, a31, a32: the blocks of low below it.
        left: rows of the chunk.
    """
    _store(t, b, f, d0, 0, 0, left, HV, C)
    one = -_exact(d1, _exact(a10, d0))
    _store(t, b, f, one, 1, 0, left, HV, C)
    two = -_exact(d2, _exact(a20, d0) + _exact(a21, one))
    _store(t, b, f, two, 2, 0, left, HV, C)
    _store(t, b, f, -_exact(d3, _exact(a30, d0) + _exact(a31, one) + _exact(a32, two)), 3, 0, left, HV, C)
    _store(t, b, f, d1, 1, 1, left, HV, C)
    two = -_exact(d2, _exact(a21, d1))
    _store(t, b, f, two, 2, 1, left, HV, C)
    _store(t, b, f, -_exact(d3, _exact(a31, d1) + _exact(a32, two)), 3, 1, left, HV, C)
    _store(t, b, f, d2, 2, 2, left, HV, C)
    _store(t, b, f, -_exact(d3, _exact(a32, d2)), 3, 2, left, HV, C)
    _store(t, b, f, d3, 3, 3, left, HV, C)
    for row in tl.static_range(3):
        for column in tl.static_range(row + 1, 4):
            _store(t, None, None, tl.zeros((16, 16), tl.float32), row, column, left, HV, C)


@triton.jit
def _store(t, b, f, x, row: tl.constexpr, column: tl.constexpr, left, HV: tl.constexpr, C: tl.constexpr):
    i, j = row * 16 + tl.arange(0, 16), column * 16 + tl.arange(0, 16)
    if b is not None:
        rise, rise_f = load_sums(b, f, i * HV, i < left, True)
        fall, fall_f = load_sums(b, f, j * HV, j < left, True)
        apart = (rise[:, None] - fall[None, :]) + (rise_f[:, None] - fall_f[None, :])
        x = x * tl.exp2(tl.where((i[:, None] >= j[None, :]) & (i < left)[:, None], apart, float("-inf")))
    tl.store(t + i[:, None] * (HV * C) + j[None, :], x.to(t.dtype.element_ty), mask=(i < left)[:, None])


@triton.jit
def store_inverse_of(t, a, factor, left, HV: tl.constexpr, C: tl.constexpr):
    """`store_inverse` of the strictly lower part of factor ∘ a, a [64, 64] fp32 matrix in memory."""
    d0 = unit_inverse(_lower(a, factor, 0, 0, left, HV, C), 16, 3)
    d1 = unit_inverse(_lower(a, factor, 1, 1, left, HV, C), 16, 3)
    d2 = unit_inverse(_lower(a, factor, 2, 2, left, HV, C), 16, 3)
    d3 = unit_inverse(_lower(a, factor, 3, 3, left, HV, C), 16, 3)
    a10, a20 = _lower(a, factor, 1, 0, left, HV, C), _lower(a, factor, 2, 0, left, HV, C)
    a21, a30 = _lower(a, factor, 2, 1, left, HV, C), _lower(a, factor, 3, 0, left, HV, C)
    a31, a32 = _lower(a, factor, 3, 1, left, HV, C), _lower(a, factor, 3, 2, left, HV, C)
    store_inverse(t, None, None, d0, d1, d2, d3, a10, a20, a21, a30, a31, a32, left, HV, C)


@triton.jit
def read_back(t, left, HV: tl.constexpr, C: tl.constexpr):
    """The [64, 64] matrix that this program has stored, whole: its blocks beside a product's operands would not fit the
    registers."""
    tl.debug_barrier()
    c = tl.arange(0, C)
    return tl.load(t + c[:, None] * (HV * C) + c[None, :], mask=(c < left)[:, None], other=0.0)


@triton.jit
def norms(q, k, rq, rk, rows, K: tl.constexpr, BK: tl.constexpr, M: tl.constexpr):
    """1 / norm of the rows of q and k."""
    row, kk = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BK)
    at = tl.cast(row, tl.int64)[:, None] * K + kk[None, :]
    inside = (row < rows)[:, None] & (kk < K)[None, :]
    x = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(rq + row, 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6), mask=row < rows)
    tl.store(rk + row, 1.0 / tl.sqrt(tl.sum(y * y, 1) + 1e-6), mask=row < rows)


@triton.jit
def gates(g, row, keep, kk, HV: tl.constexpr, K: tl.constexpr):
    """[rows, channels] log2 decays of rows of a chunk and head that ``g`` points to; 0 where not ``keep``."""
    return load_rows(g, row, keep, kk, HV, K).to(tl.float32) * LOG2E


@triton.jit
def block_decays(
    g, block, left, kk, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Log2 decays around block ``block`` of R rows of a chunk with ``left`` rows; none is positive.

    Sums of neighbours, never differences of sums, so that they keep all their digits beside any faster decay.

    Returns:
        local [R, k] from the block's start through each row, rest [R, k] after each row to the block's end,
        earlier [C, k] after each row of earlier blocks to the block's start, later [C, k] from the block's end through
        each row of later blocks, before and after [k] of all earlier and all later rows.
    """
    i, c = tl.arange(0, R), tl.arange(0, C)
    start = block * R
    local = tl.cumsum(gates(g, start + i, start + i < left, kk, HV, K), 0)
    following = gates(g, start + i + 1, (i + 1 < R) & (start + i + 1 < left), kk, HV, K)
    rest = tl.cumsum(following, 0, reverse=True)
    following = gates(g, c + 1, (c + 1 < start) & (c + 1 < left), kk, HV, K)
    earlier = tl.cumsum(following, 0, reverse=True)
    before = tl.sum(gates(g, c, (c < start) & (c < left), kk, HV, K), 0)
    beyond = gates(g, c, (c >= start + R) & (c < left), kk, HV, K)
    return local, rest, earlier, tl.cumsum(beyond, 0), before, tl.sum(beyond, 0)


@triton.jit
def half_decays(own, before, after, SIZE: tl.constexpr):
    """Decays around the middles between halves of ``SIZE`` rows of a block of R, from log2 decays [R, k]: those of each
    row, of the one before it and of the one after it. Sums of neighbours, as `block_decays`.

    Returns:
        [R, k] from the middle through each row of a later half, the same without the row, after each row of an earlier
        half to the middle, each 0 in the other halves; and which pairs [R, R] are of two halves of one middle.
    """
    i = tl.arange(0, own.shape[0])
    later = (i // SIZE) % 2 == 1
    through = _half_sums(own, i >= 0, SIZE, False)
    until, rest = _half_sums(before, i % SIZE != 0, SIZE, False), _half_sums(after, (i + 1) % SIZE != 0, SIZE, True)
    rise, rise_until = tl.where(later[:, None], tl.exp2(through), 0.0), tl.where(later[:, None], tl.exp2(until), 0.0)
    apart = (i // SIZE)[:, None] == (i // SIZE)[None, :] + 1
    return rise, rise_until, tl.where(later[:, None], 0.0, tl.exp2(rest)), apart & later[:, None]


@triton.jit
def _half_sums(decays, inside, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    halves: tl.constexpr = decays.shape[0] // SIZE
    split = tl.reshape(tl.where(inside[:, None], decays, 0.0), (halves, SIZE, decays.shape[1]))
    return tl.reshape(tl.cumsum(split, 1, reverse=REVERSE), decays.shape)


@triton.jit
def scan_forward(
    q, p, w, u, k, whole, v, p2, k2, o, new, states, initial, final, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    here, s = begin_scan(table, initial, HV, K, V, BK, BV)
    for place in range(tl.cdiv(here.length, C)):
        now = scan_chunk(here, place, HV, HV, K, V, C)
        bq, bw = load_tile(q, now.at_k, now.in_k), load_tile(w, now.at_k, now.in_k)
        bk, bp = load_tile(k, now.at_k, now.in_k), load_tile(p, now.at_c, now.in_c)
        store_state(states, now.number, here, s, HV, K, V)
        half = s.to(q.dtype.element_ty)
        fresh = tl.load(u + now.at_v, mask=now.in_v, other=0.0).to(tl.float32)
        fresh = tl.dot(at_hand(bw, PRECISION), half, fresh, input_precision=PRECISION)
        out = tl.dot(at_hand(bq, PRECISION), half, input_precision=PRECISION)
        s = s * _whole(whole, now.number, here, HV, K)
        if v is not None:
            bv = tl.load(v + now.at_v, mask=now.in_v, other=0.0)
            bp2 = tl.load(p2 + now.at_c, mask=now.in_c, other=0.0)
            out = tl.dot(bp2, bv, out, input_precision=PRECISION)
            bk2 = tl.load(k2 + now.at_k, mask=now.in_k, other=0.0)
            s = tl.dot(tl.trans(bk2), bv, s, input_precision=PRECISION)
        bn = fresh.to(half.dtype)
        out = tl.dot(at_hand(bp, PRECISION), bn, out, input_precision=PRECISION)
        tl.store(o + now.at_v, out.to(o.dtype.element_ty), mask=now.in_v)
        if states is not None:
            tl.store(new + now.at_v, bn, mask=now.in_v)
        s = tl.dot(tl.trans(at_hand(bk, PRECISION)), bn, s, input_precision=PRECISION)
    store_state(final, here.segment, here, s, HV, K, V)


@triton.jit
def scan_backward(
    q, p, w, k, whole, do, dn, dstates, dfinal, dinitial, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dN = Pᵀ dO + K dS and each chunk's leaving dS, from the last chunk to the first."""
    here, ds = begin_scan(table, dfinal, HV, K, V, BK, BV)
    count = tl.cdiv(here.length, C)
    for done in range(count):
        now = scan_chunk(here, count - 1 - done, HV, HV, K, V, C)
        bq, bw = load_tile(q, now.at_k, now.in_k), load_tile(w, now.at_k, now.in_k)
        bk, bp = load_tile(k, now.at_k, now.in_k), load_tile(p, now.at_c, now.in_c)
        bo = tl.load(do + now.at_v, mask=now.in_v, other=0.0)
        store_state(dstates, now.number, here, ds, HV, K, V)
        bn = tl.dot(tl.trans(at_hand(bp, PRECISION)), bo, input_precision=PRECISION)
        bn = tl.dot(at_hand(bk, PRECISION), ds.to(bo.dtype), bn, input_precision=PRECISION).to(bo.dtype)
        tl.store(dn + now.at_v, bn, mask=now.in_v)
        ds = ds * _whole(whole, now.number, here, HV, K)
        ds = tl.dot(tl.trans(at_hand(bq, PRECISION)), bo, ds, input_precision=PRECISION)
        ds = tl.dot(tl.trans(at_hand(bw, PRECISION)), bn, ds, input_precision=PRECISION)
    store_state(dinitial, here.segment, here, ds, HV, K, V)


@triton.jit
def _whole(whole, number, here, HV: tl.constexpr, K: tl.constexpr):
    """Decay of a chunk, one column."""
    row = tl.cast(number, tl.int64) * HV + here.head
    return tl.load(whole + row * K + here.kk, mask=here.kk < K, other=0.0)[:, None]


@triton.jit
def reduce_heads(
    q, k, dqs, dks, dq, dk, rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Sums the value heads of a key head and goes back through the norm; queries in grid row 0, keys in 1."""
    row, kk, head = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, BK), tl.program_id(1)
    inside = (row < rows)[:, None] & (kk < K)[None, :]
    at = (tl.cast(row, tl.int64)[:, None] * H + head) * K + kk[None, :]
    many = (tl.cast(row, tl.int64)[:, None] * HV + head * (HV // H)) * K + kk[None, :]
    if tl.program_id(2) == 0:
        _reduce(q, dqs, dq, at, many, inside, HV // H, K, NORM)
    else:
        _reduce(k, dks, dk, at, many, inside, HV // H, K, NORM)


@triton.jit
def _reduce(x, parts, dx, at, many, inside, R: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr):
    total = tl.zeros(at.shape, tl.float32)
    for r in range(R):
        total += tl.load(parts + many + r * K, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]
        unit = wide * r
        total = r * (total - unit * tl.sum(unit * total, 1)[:, None])
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
