"""Triton kernels that the operators of the delta family share; formulas stand with the operators.

A chunk of Kimi delta attention or of RWKV-7 is N = U + W S, O = Q S + P N [+ P2 V], S' = diag(e) S + Kᵀ N [+ K2ᵀ V],
with everything but S known for all chunks at once: the scans hold the state and form two products one after the other.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_factor(x, at, live):
    """One number per row of a chunk, fp32; 1 where there are none."""
    value = tl.full(live.shape, 1.0, tl.float32)
    if x is not None:
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    return value


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
        step = tl.dot(tl.where(between, low, 0.0), inverse, input_precision="tf32x3")
        inverse -= tl.dot(inverse, step, input_precision="tf32x3")
        size = size * 2
    return inverse


@triton.jit
def _exact(x, y):
    return tl.dot(x, y, input_precision="tf32x3")


@triton.jit
def _lower(a, factor, row: tl.constexpr, column: tl.constexpr, left, HV: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, 16)
    live = row * 16 + i < left
    at = (row * 16 + i)[:, None] * (HV * C) + (column * 16 + i)[None, :]
    keep = live[:, None] & ((row != column) | (i[:, None] > i[None, :]))
    return tl.load(a + at, mask=keep, other=0.0) * row_factor(factor, (row * 16 + i) * HV, live)[:, None]


@triton.jit
def block_inverse(a, factor, left, HV: tl.constexpr, C: tl.constexpr):
    """(I + factor ∘ a)^-1 of the strictly lower part of a [64, 64] fp32 matrix of a chunk with ``left`` rows.

    By forward substitution over blocks of 16 rows, whose products are small enough for the registers.

    Returns:
        The blocks (0, 0), (1, 0), (1, 1), (2, 0) … (3, 3), each [16, 16].
    """
    t00, t11 = (
        unit_inverse(_lower(a, factor, 0, 0, left, HV, C), 16, 3),
        unit_inverse(_lower(a, factor, 1, 1, left, HV, C), 16, 3),
    )
    t22, t33 = (
        unit_inverse(_lower(a, factor, 2, 2, left, HV, C), 16, 3),
        unit_inverse(_lower(a, factor, 3, 3, left, HV, C), 16, 3),
    )
    a10, a21, a32 = (
        _lower(a, factor, 1, 0, left, HV, C),
        _lower(a, factor, 2, 1, left, HV, C),
        _lower(a, factor, 3, 2, left, HV, C),
    )
    t10, t21, t32 = -_exact(t11, _exact(a10, t00)), -_exact(t22, _exact(a21, t11)), -_exact(t33, _exact(a32, t22))
    a20, a31 = _lower(a, factor, 2, 0, left, HV, C), _lower(a, factor, 3, 1, left, HV, C)
    t20 = -_exact(t22, _exact(a20, t00) + _exact(a21, t10))
    t31 = -_exact(t33, _exact(a31, t11) + _exact(a32, t21))
    a30 = _lower(a, factor, 3, 0, left, HV, C)
    t30 = -_exact(t33, _exact(a30, t00) + _exact(a31, t10) + _exact(a32, t20))
    return t00, t10, t11, t20, t21, t22, t30, t31, t32, t33


@triton.jit
def store_lower(t, blocks, left, HV: tl.constexpr, C: tl.constexpr):
    """Stores the blocks of `block_inverse`, and zeros above the diagonal."""
    i = tl.arange(0, 16)
    for row in tl.static_range(4):
        for column in tl.static_range(4):
            at = (row * 16 + i)[:, None] * (HV * C) + (column * 16 + i)[None, :]
            x = tl.zeros((16, 16), tl.float32)
            if column <= row:
                x += blocks[row * (row + 1) // 2 + column]
            tl.store(t + at, x.to(t.dtype.element_ty), mask=(row * 16 + i < left)[:, None])


@triton.jit
def store_product(
    blocks, x0, x1, x2, x3, into, left, columns, HV: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr
):
    """Stores the product of the blocks of `block_inverse` with x [64, columns], given in four pieces."""
    i = tl.arange(0, 16)
    fits = (columns < D)[None, :]
    at = i[:, None] * (HV * D) + columns[None, :]
    y0 = tl.dot(blocks[0].to(x0.dtype), x0, input_precision=PRECISION)
    tl.store(into + at, y0.to(into.dtype.element_ty), mask=(i < left)[:, None] & fits)
    y1 = tl.dot(blocks[1].to(x0.dtype), x0, input_precision=PRECISION)
    y1 = tl.dot(blocks[2].to(x0.dtype), x1, y1, input_precision=PRECISION)
    tl.store(into + at + 16 * HV * D, y1.to(into.dtype.element_ty), mask=(i + 16 < left)[:, None] & fits)
    y2 = tl.dot(blocks[3].to(x0.dtype), x0, input_precision=PRECISION)
    y2 = tl.dot(blocks[4].to(x0.dtype), x1, y2, input_precision=PRECISION)
    y2 = tl.dot(blocks[5].to(x0.dtype), x2, y2, input_precision=PRECISION)
    tl.store(into + at + 32 * HV * D, y2.to(into.dtype.element_ty), mask=(i + 32 < left)[:, None] & fits)
    y3 = tl.dot(blocks[6].to(x0.dtype), x0, input_precision=PRECISION)
    y3 = tl.dot(blocks[7].to(x0.dtype), x1, y3, input_precision=PRECISION)
    y3 = tl.dot(blocks[8].to(x0.dtype), x2, y3, input_precision=PRECISION)
    y3 = tl.dot(blocks[9].to(x0.dtype), x3, y3, input_precision=PRECISION)
    tl.store(into + at + 48 * HV * D, y3.to(into.dtype.element_ty), mask=(i + 48 < left)[:, None] & fits)


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
    at = row[:, None] * (HV * K) + kk[None, :]
    return tl.load(g + at, mask=keep[:, None] & (kk < K)[None, :], other=0.0).to(tl.float32) * LOG2E


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
def scan_forward(
    q, p, w, u, k, whole, v, p2, k2, o, new, states, initial, final, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    head, entry = tl.program_id(1), table + tl.program_id(2) * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    at_state = kk[:, None] * V + vv[None, :]
    in_state = (kk < K)[:, None] & (vv < V)[None, :]
    s = tl.zeros((BK, BV), tl.float32)
    if initial is not None:
        s += tl.load(initial + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, mask=in_state, other=0.0)
    for place in range(tl.cdiv(length, C)):
        row = tl.cast(first + place * C, tl.int64) * HV + head
        live = place * C + c < length
        at_k, in_k = row * K + c[:, None] * (HV * K) + kk[None, :], live[:, None] & (kk < K)[None, :]
        at_v, in_v = row * V + c[:, None] * (HV * V) + vv[None, :], live[:, None] & (vv < V)[None, :]
        square, number = row * C + c[:, None] * (HV * C) + c[None, :], tl.cast(chunk + place, tl.int64) * HV + head
        bq = tl.load(q + at_k, mask=in_k, other=0.0)
        bw, bk = tl.load(w + at_k, mask=in_k, other=0.0), tl.load(k + at_k, mask=in_k, other=0.0)
        bp = tl.load(p + square, mask=live[:, None], other=0.0)
        if states is not None:
            tl.store(states + number * K * V + at_state, s.to(states.dtype.element_ty), mask=in_state)
        half = s.to(bq.dtype)
        fresh = tl.load(u + at_v, mask=in_v, other=0.0).to(tl.float32)
        fresh = tl.dot(bw, half, fresh, input_precision=PRECISION)
        out = tl.dot(bq, half, input_precision=PRECISION)
        s = s * tl.load(whole + number * K + kk, mask=kk < K, other=0.0)[:, None]
        if v is not None:
            bv = tl.load(v + at_v, mask=in_v, other=0.0)
            out = tl.dot(tl.load(p2 + square, mask=live[:, None], other=0.0), bv, out, input_precision=PRECISION)
            b2 = tl.load(k2 + at_k, mask=in_k, other=0.0)
            s = tl.dot(tl.trans(b2), bv, s, input_precision=PRECISION)
        bn = fresh.to(bq.dtype)
        out = tl.dot(bp, bn, out, input_precision=PRECISION)
        tl.store(o + at_v, out.to(o.dtype.element_ty), mask=in_v)
        if states is not None:
            tl.store(new + at_v, bn, mask=in_v)
        s = tl.dot(tl.trans(bk), bn, s, input_precision=PRECISION)
    if final is not None:
        tl.store(final + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, s, mask=in_state)


@triton.jit
def scan_backward(
    q, p, w, k, whole, do, dn, dstates, dfinal, dinitial, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dN = Pᵀ dO + K dS and each chunk's leaving dS, from the last chunk to the first."""
    head, entry = tl.program_id(1), table + tl.program_id(2) * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    at_state = kk[:, None] * V + vv[None, :]
    in_state = (kk < K)[:, None] & (vv < V)[None, :]
    ds = tl.zeros((BK, BV), tl.float32)
    if dfinal is not None:
        ds += tl.load(dfinal + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, mask=in_state, other=0.0)
    count = tl.cdiv(length, C)
    for done in range(count):
        place = count - 1 - done
        row = tl.cast(first + place * C, tl.int64) * HV + head
        live = place * C + c < length
        at_k, in_k = row * K + c[:, None] * (HV * K) + kk[None, :], live[:, None] & (kk < K)[None, :]
        at_v, in_v = row * V + c[:, None] * (HV * V) + vv[None, :], live[:, None] & (vv < V)[None, :]
        square, number = row * C + c[:, None] * (HV * C) + c[None, :], tl.cast(chunk + place, tl.int64) * HV + head
        bq = tl.load(q + at_k, mask=in_k, other=0.0)
        bw, bk = tl.load(w + at_k, mask=in_k, other=0.0), tl.load(k + at_k, mask=in_k, other=0.0)
        bp = tl.load(p + square, mask=live[:, None], other=0.0)
        bo = tl.load(do + at_v, mask=in_v, other=0.0)
        tl.store(dstates + number * K * V + at_state, ds.to(dstates.dtype.element_ty), mask=in_state)
        bn = tl.dot(tl.trans(bp), bo, input_precision=PRECISION)
        bn = tl.dot(bk, ds.to(bk.dtype), bn, input_precision=PRECISION).to(bk.dtype)
        tl.store(dn + at_v, bn, mask=in_v)
        ds = ds * tl.load(whole + number * K + kk, mask=kk < K, other=0.0)[:, None]
        ds = tl.dot(tl.trans(bq), bo, ds, input_precision=PRECISION)
        ds = tl.dot(tl.trans(bw), bn, ds, input_precision=PRECISION)
    if dinitial is not None:
        tl.store(dinitial + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, ds, mask=in_state)


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
