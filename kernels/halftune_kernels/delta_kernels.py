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
def load_sums(b, f, at, live):
    """The two parts of `decay_sums`; 0 where not ``live``."""
    return tl.load(b + at, mask=live, other=0.0), tl.load(f + at, mask=live, other=0.0)


@triton.jit
def load_sums_for(b, f, at, live, PRECISION: tl.constexpr):
    """`load_sums`, in half without the second part: its products round more, and the registers are short."""
    sums, parts = tl.load(b + at, mask=live, other=0.0), tl.zeros(live.shape, tl.float32)
    if PRECISION == "tf32x3":
        parts = tl.load(f + at, mask=live, other=0.0)
    return sums, parts


@triton.jit
def pair_decays(b, f, keep):
    """exp2 of the decay from column j through row i [C, C] by the two parts of `decay_sums`; 0 where not ``keep``."""
    apart = (b[:, None] - b[None, :]) + (f[:, None] - f[None, :])
    return tl.exp2(tl.where(keep, apart, float("-inf")))


@triton.jit
def remaining_decay(b, f, last_b, last_f, live):
    """exp2 of the decay after each row to the chunk's end; 0 where not ``live``."""
    return tl.where(live, tl.exp2((last_b - b) + (last_f - f)), 0.0)


@triton.jit
def between(pairs, C: tl.constexpr):
    """What the decay of each row t has of pairs [C, C] of rows: those with i >= t > j, which it stands between.

    Summed over these alone: all rows' sums less all columns' would be the same number only up to the rounding of what
    cancels, and that is large beside a small gradient."""
    c = tl.arange(0, C)
    apart = tl.where(c[:, None] > c[None, :], pairs, 0.0)
    return tl.sum(tl.where(c[:, None] > c[None, :], tl.cumsum(apart, 0, reverse=True), 0.0), 1)


@triton.jit
def scan_place(HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Tile of values, head and segment of a scan's program: all on the first axis of the grid, for the others end at
    65,535, and a batch or a packed row may hold more samples."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    number = tl.program_id(0)
    return number % tiles, number // tiles % HV, number // (tiles * HV)


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
        rise, rise_f = load_sums(b, f, i * HV, i < left)
        fall, fall_f = load_sums(b, f, j * HV, j < left)
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
def load_tile(x, at, keep):
    """A tile of a chunk; 0 where not ``keep``."""
    return tl.load(x + at, mask=keep, other=0.0)


@triton.jit
def at_hand(tile, x, at, keep, PRECISION: tl.constexpr):
    """``tile`` of a scan, for a product now.

    In half all tiles of a chunk are read at the top of the loop, which waits for them once. In fp32 they would be more
    than the registers hold, each split in two for tf32x3: there each is read here, and the compiler drops the read
    above."""
    if PRECISION == "tf32x3":
        tile = tl.load(x + at, mask=keep, other=0.0)
    return tile


@triton.jit
def scan_forward(
    q, p, w, u, k, whole, v, p2, k2, o, new, states, initial, final, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    part, head, segment = scan_place(HV, V, BV)
    entry = table + segment * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
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
        bq, bw, bk = load_tile(q, at_k, in_k), load_tile(w, at_k, in_k), load_tile(k, at_k, in_k)
        bp = load_tile(p, square, live[:, None])
        if states is not None:
            tl.store(states + number * K * V + at_state, s.to(states.dtype.element_ty), mask=in_state)
        half = s.to(q.dtype.element_ty)
        fresh = load_tile(u, at_v, in_v).to(tl.float32)
        bw = at_hand(bw, w, at_k, in_k, PRECISION)
        fresh = tl.dot(bw, half, fresh, input_precision=PRECISION)
        bq = at_hand(bq, q, at_k, in_k, PRECISION)
        out = tl.dot(bq, half, input_precision=PRECISION)
        s = s * tl.load(whole + number * K + kk, mask=kk < K, other=0.0)[:, None]
        if v is not None:
            bv = load_tile(v, at_v, in_v)
            out = tl.dot(load_tile(p2, square, live[:, None]), bv, out, input_precision=PRECISION)
            s = tl.dot(tl.trans(load_tile(k2, at_k, in_k)), bv, s, input_precision=PRECISION)
        bn = fresh.to(half.dtype)
        bp = at_hand(bp, p, square, live[:, None], PRECISION)
        out = tl.dot(bp, bn, out, input_precision=PRECISION)
        tl.store(o + at_v, out.to(o.dtype.element_ty), mask=in_v)
        if states is not None:
            tl.store(new + at_v, bn, mask=in_v)
        bk = at_hand(bk, k, at_k, in_k, PRECISION)
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
    part, head, segment = scan_place(HV, V, BV)
    entry = table + segment * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
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
        bq, bw, bk = load_tile(q, at_k, in_k), load_tile(w, at_k, in_k), load_tile(k, at_k, in_k)
        bp = load_tile(p, square, live[:, None])
        bo = load_tile(do, at_v, in_v)
        tl.store(dstates + number * K * V + at_state, ds.to(dstates.dtype.element_ty), mask=in_state)
        bp = at_hand(bp, p, square, live[:, None], PRECISION)
        bn = tl.dot(tl.trans(bp), bo, input_precision=PRECISION)
        bk = at_hand(bk, k, at_k, in_k, PRECISION)
        bn = tl.dot(bk, ds.to(bk.dtype), bn, input_precision=PRECISION).to(bk.dtype)
        tl.store(dn + at_v, bn, mask=in_v)
        ds = ds * tl.load(whole + number * K + kk, mask=kk < K, other=0.0)[:, None]
        bq = at_hand(bq, q, at_k, in_k, PRECISION)
        ds = tl.dot(tl.trans(bq), bo, ds, input_precision=PRECISION)
        bw = at_hand(bw, w, at_k, in_k, PRECISION)
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
