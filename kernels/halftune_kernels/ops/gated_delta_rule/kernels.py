"""Triton kernels of the gated delta rule: two forward, three backward.

Notation of a chunk of C rows (Yang et al., arXiv:2412.06464, section 3): b inclusive sum of the log decay, e = exp(b),
l = exp(b_C - b), D_ij = exp(b_i - b_j) for i >= j, S the state that enters, B = diag(beta).

    T = (I + tril(B K K^T, -1))^-1        free of the decay: with it, the inverse is T * D
    X = B (V - e K S)    N = (T * D) X    O = scale [e Q S + (Q K^T * D) N]    S' = exp(b_C) S + (l K)^T N

Backward, from dO and the leaving state's dS: dN = scale (Q K^T * D)^T dO + l K dS, dX = (T * D)^T dN, dV = B dX,
dS_entering = exp(b_C) dS + scale (e Q)^T dO - (B e K)^T dX. With Y = -dX S^T, dP = scale tril(dO N^T) * D and
dM = -tril(dX N^T, -1) * D:

    dQ = scale e dO S^T + dP K        dK = l N dS^T + dP^T Q + B e Y + B dM K + (B dM)^T K
    dbeta = <dX, V> + <Y, e K> + rowsum(dM * K K^T)

What does not depend on the state (b, T * D and scale Q K^T * D) is computed for all chunks at once; the scans then hold
little and wait for little. b is kept as an fp32 number and what its rounding left (f).
N and dX are stored, one row of values each per token and head: with them the third backward
kernel needs neither T nor W = T B K nor U = T B V, every product there is of tiles read from memory, and no product's
result is ever transposed, which some Triton versions compile wrongly. Norms of q and k are factors of rows and columns,
so that tiles go from memory to the products as they are. Exponents are at most 0; sums are fp32.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

import triton
import triton.language as tl

from halftune_kernels.delta_kernels import (
    at_hand,
    between,
    decay_sums,
    load_sums,
    load_sums_for,
    load_tile,
    pair_decays,
    remaining_decay,
    row_factor,
    scan_place,
    store_inverse,
    unit_inverse,
)


@triton.jit
def _keys(k, row: tl.constexpr, kk, left, H: tl.constexpr, K: tl.constexpr):
    i = row * 16 + tl.arange(0, 16)
    inside = (i < left)[:, None] & (kk < K)[None, :]
    return tl.load(k + i[:, None] * (H * K) + kk[None, :], mask=inside, other=0.0)


@triton.jit
def _square(x):
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _diagonal(
    k, beta, normed, row: tl.constexpr, left, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    TK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of 16 rows of a chunk: the inverse of their block of I + tril(B K K^T, -1), what its rows and its columns are to
    be multiplied by: beta and 1 / norm, if ``normed`` is given."""
    i = tl.arange(0, 16)
    x, squares = tl.zeros((16, 16), tl.float32), tl.zeros((16,), tl.float32)
    for tile in range(0, BK, TK):
        y = _keys(k, row, tile + tl.arange(0, TK), left, H, K)
        x = tl.dot(y, tl.trans(y), x, input_precision=PRECISION)
        squares += _square(y)
    columns = tl.full((16,), 1.0, tl.float32)
    if normed is not None:
        columns = _inverse_norm(squares)
    rows = columns * row_factor(beta, (row * 16 + i) * HV, row * 16 + i < left)
    return unit_inverse(tl.where(i[:, None] > i[None, :], _scaled(x, rows, columns), 0.0), 16, 3), rows, columns


@triton.jit
def _store_inverse(
    t, b, f, k, beta, normed, left,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """T * D of one chunk; of unit keys if ``normed`` is given."""
    d0, _, n0 = _diagonal(k, beta, normed, 0, left, H, HV, K, BK, TK, PRECISION)
    d1, b1, n1 = _diagonal(k, beta, normed, 1, left, H, HV, K, BK, TK, PRECISION)
    d2, b2, n2 = _diagonal(k, beta, normed, 2, left, H, HV, K, BK, TK, PRECISION)
    d3, b3, _ = _diagonal(k, beta, normed, 3, left, H, HV, K, BK, TK, PRECISION)
    zero = tl.zeros((16, 16), tl.float32)
    a10, a20, a21, a30, a31, a32 = zero, zero, zero, zero, zero, zero
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        x0, x1 = _keys(k, 0, kk, left, H, K), _keys(k, 1, kk, left, H, K)
        x2, x3 = _keys(k, 2, kk, left, H, K), _keys(k, 3, kk, left, H, K)
        a10 = tl.dot(x1, tl.trans(x0), a10, input_precision=PRECISION)
        a20 = tl.dot(x2, tl.trans(x0), a20, input_precision=PRECISION)
        a30 = tl.dot(x3, tl.trans(x0), a30, input_precision=PRECISION)
        a21 = tl.dot(x2, tl.trans(x1), a21, input_precision=PRECISION)
        a31 = tl.dot(x3, tl.trans(x1), a31, input_precision=PRECISION)
        a32 = tl.dot(x3, tl.trans(x2), a32, input_precision=PRECISION)
    a10, a20, a30 = _scaled(a10, b1, n0), _scaled(a20, b2, n0), _scaled(a30, b3, n0)
    a21, a31, a32 = _scaled(a21, b2, n1), _scaled(a31, b3, n1), _scaled(a32, b3, n2)
    store_inverse(t, b, f, d0, d1, d2, d3, a10, a20, a21, a30, a31, a32, left, HV, C)


@triton.jit
def _scaled(x, rows, columns):
    return x * rows[:, None] * columns[None, :]


@triton.jit
def _inverse_norm(squares):
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit
def solve(
    q, k, g, beta, t, p, b, f, rq, rk, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """T of one chunk and head.

    Stores what the scans need and do not depend on the state: b, T * D and P = scale Q K^T * D. If rq and rk are given,
    they get 1 / norm of the rows of q and k, and these count as divided by theirs."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    base = tl.cast(first + place * C, tl.int64)
    c, left = tl.arange(0, C), length - place * C
    live = c < left
    hk = head // (HV // H)
    met, nq, nk = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        at = (base * H + hk) * K + c[:, None] * (H * K) + kk[None, :]
        inside = live[:, None] & (kk < K)[None, :]
        x, y = tl.load(k + at, mask=inside, other=0.0), tl.load(q + at, mask=inside, other=0.0)
        met = tl.dot(y, tl.trans(x), met, input_precision=PRECISION)
        nq, nk = nq + _square(y), nk + _square(x)
    by_row = base * HV + head + c * HV
    sums, parts = decay_sums(g + by_row, live)
    tl.store(b + by_row, sums, mask=live)
    tl.store(f + by_row, parts, mask=live)
    met = met * pair_decays(sums, parts, c[:, None] >= c[None, :]) * scale
    if rk is not None:
        nq, nk = _inverse_norm(nq), _inverse_norm(nk)
        met = _scaled(met, nq, nk)
        if head % (HV // H) == 0:
            tl.store(rk + base * H + hk + c * H, nk, mask=live)
            tl.store(rq + base * H + hk + c * H, nq, mask=live)
    square = (base * HV + head) * C
    tl.store(p + square + c[:, None] * (HV * C) + c[None, :], met.to(p.dtype.element_ty), mask=live[:, None])
    row = base * HV + head
    tl.debug_barrier()  # b and f are read back in pieces
    k += (base * H + hk) * K
    _store_inverse(t + square, b + row, f + row, k, beta + row, rk, left, H, HV, K, C, BK, TK, PRECISION)


@triton.jit
def scan_forward(
    q, k, v, b, f, beta, t, p, rq, rk, o, new, states, initial, final, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    part, head, segment = scan_place(HV, V, BV)
    hk, entry = head // (HV // H), table + segment * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    at_state = kk[:, None] * V + vv[None, :]
    in_state = (kk < K)[:, None] & (vv < V)[None, :]
    s = tl.zeros((BK, BV), tl.float32)
    if initial is not None:
        s += tl.load(initial + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, mask=in_state, other=0.0)
    for place in range(tl.cdiv(length, C)):
        base = tl.cast(first + place * C, tl.int64)
        live = place * C + c < length
        in_k, in_v = live[:, None] & (kk < K)[None, :], live[:, None] & (vv < V)[None, :]
        at_k, at_v = c[:, None] * (H * K) + kk[None, :], c[:, None] * (HV * V) + vv[None, :]
        from_k, from_t, at_t = (base * H + hk) * K, (base * HV + head) * C, c[:, None] * (HV * C) + c[None, :]
        bk, bq = load_tile(k + from_k, at_k, in_k), load_tile(q + from_k, at_k, in_k)
        nk = row_factor(rk, base * H + hk + c * H, live)
        nq = row_factor(rq, base * H + hk + c * H, live) * scale
        bv = load_tile(v + (base * HV + head) * V, at_v, in_v).to(tl.float32)
        bt, bp = load_tile(t + from_t, at_t, live[:, None]), load_tile(p + from_t, at_t, live[:, None])
        by_row = base * HV + head + c * HV
        sums, parts = load_sums(b, f, by_row, live)
        end = (base + tl.minimum(C, length - place * C) - 1) * HV + head
        last, last_part = tl.load(b + end), tl.load(f + end)
        bb = tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)
        e, left = tl.exp2(sums + parts), remaining_decay(sums, parts, last, last_part, live)
        if states is not None:
            into = states + (tl.cast(chunk + place, tl.int64) * HV + head) * K * V + at_state
            tl.store(into, s.to(states.dtype.element_ty), mask=in_state)
        half = s.to(k.dtype.element_ty)
        bk = at_hand(bk, k + from_k, at_k, in_k, PRECISION)
        x = bb[:, None] * (bv - (e * nk)[:, None] * tl.dot(bk, half, input_precision=PRECISION))
        bt = at_hand(bt, t + from_t, at_t, live[:, None], PRECISION)
        fresh = tl.dot(bt, x.to(half.dtype), input_precision=PRECISION)
        bq = at_hand(bq, q + from_k, at_k, in_k, PRECISION)
        out = (e * nq)[:, None] * tl.dot(bq, half, input_precision=PRECISION)
        bp = at_hand(bp, p + from_t, at_t, live[:, None], PRECISION)
        out += tl.dot(bp, fresh.to(half.dtype), input_precision=PRECISION)
        tl.store(o + (base * HV + head) * V + at_v, out.to(o.dtype.element_ty), mask=in_v)
        if states is not None:
            tl.store(new + (base * HV + head) * V + at_v, fresh.to(new.dtype.element_ty), mask=in_v)
        kept = (fresh * (left * nk)[:, None]).to(half.dtype)
        bk = at_hand(bk, k + from_k, at_k, in_k, PRECISION)
        s = s * tl.exp2(last + last_part) + tl.dot(tl.trans(bk), kept, input_precision=PRECISION)
    if final is not None:
        tl.store(final + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, s, mask=in_state)


@triton.jit
def scan_backward(
    q, k, b, f, beta, t, p, rq, rk, do, dv, dx, dstates, dfinal, dinitial, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX, dV and each chunk's leaving dS, from the last chunk to the first."""
    part, head, segment = scan_place(HV, V, BV)
    hk, entry = head // (HV // H), table + segment * 4
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
        base = tl.cast(first + place * C, tl.int64)
        live = place * C + c < length
        in_k, in_v = live[:, None] & (kk < K)[None, :], live[:, None] & (vv < V)[None, :]
        at_k, at_v = c[:, None] * (H * K) + kk[None, :], c[:, None] * (HV * V) + vv[None, :]
        from_k, from_t, at_t = (base * H + hk) * K, (base * HV + head) * C, c[:, None] * (HV * C) + c[None, :]
        bk, bq = load_tile(k + from_k, at_k, in_k), load_tile(q + from_k, at_k, in_k)
        nk = row_factor(rk, base * H + hk + c * H, live)
        nq = row_factor(rq, base * H + hk + c * H, live) * scale
        bo = load_tile(do + (base * HV + head) * V, at_v, in_v)
        bt, bp = load_tile(t + from_t, at_t, live[:, None]), load_tile(p + from_t, at_t, live[:, None])
        by_row = base * HV + head + c * HV
        sums, parts = load_sums(b, f, by_row, live)
        end = (base + tl.minimum(C, length - place * C) - 1) * HV + head
        last, last_part = tl.load(b + end), tl.load(f + end)
        bb = tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)
        e, left = tl.exp2(sums + parts), remaining_decay(sums, parts, last, last_part, live)
        into = dstates + (tl.cast(chunk + place, tl.int64) * HV + head) * K * V + at_state
        tl.store(into, ds.to(dstates.dtype.element_ty), mask=in_state)
        kind = k.dtype.element_ty
        bk = at_hand(bk, k + from_k, at_k, in_k, PRECISION)
        dn = (left * nk)[:, None] * tl.dot(bk, ds.to(kind), input_precision=PRECISION)
        bp = at_hand(bp, p + from_t, at_t, live[:, None], PRECISION)
        dn += tl.dot(tl.trans(bp), bo, input_precision=PRECISION)
        bt = at_hand(bt, t + from_t, at_t, live[:, None], PRECISION)
        bx = tl.dot(tl.trans(bt), dn.to(kind), input_precision=PRECISION)
        tl.store(dx + (base * HV + head) * V + at_v, bx.to(dx.dtype.element_ty), mask=in_v)
        bx = bx * bb[:, None]
        tl.store(dv + (base * HV + head) * V + at_v, bx.to(dv.dtype.element_ty), mask=in_v)
        ds = ds * tl.exp2(last + last_part)
        bq = at_hand(bq, q + from_k, at_k, in_k, PRECISION)
        ds += tl.dot(tl.trans(bq), (bo.to(tl.float32) * (e * nq)[:, None]).to(kind), input_precision=PRECISION)
        bk = at_hand(bk, k + from_k, at_k, in_k, PRECISION)
        ds -= tl.dot(tl.trans(bk), (bx * (e * nk)[:, None]).to(kind), input_precision=PRECISION)
    if dinitial is not None:
        tl.store(dinitial + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, ds, mask=in_state)


@triton.jit
def _row_factors(b, f, beta, rq, rk, at, at_k, live, PRECISION: tl.constexpr):
    """b, f, beta and 1 / norm of q and k; the barrier keeps the compiler from holding those of an earlier call."""
    tl.debug_barrier()
    sums, parts = load_sums_for(b, f, at, live, PRECISION)
    bb = tl.load(beta + at, mask=live, other=0.0).to(tl.float32)
    return sums, parts, bb, row_factor(rq, at_k, live), row_factor(rk, at_k, live)


@triton.jit
def chunk_backward(
    q, k, v, b, f, beta, rq, rk, do, new, dx, states, dstates, dq, dk, dg, dbeta, table, scale, keys, values,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and dK of one chunk and value head (of the unit rows), dg and dbeta.

    keys and values are K and V once more: as constants they would let the compiler unroll the loops, and spill."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head, hk = tl.program_id(1), tl.program_id(1) // (HV // H)
    base = tl.cast(first + place * C, tl.int64)
    c = tl.arange(0, C)
    live = place * C + c < length
    at = c[:, None] * (H * K)
    q += (base * H + hk) * K
    k += (base * H + hk) * K
    at_v = (base * HV + head) * V + c[:, None] * (HV * V)
    at_state = (tl.cast(tl.program_id(0), tl.int64) * HV + head) * K * V
    by_row = base * HV + head + c * HV

    p, m, dbe = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        inside = live[:, None] & (vv < V)[None, :]
        bo = tl.load(do + at_v + vv[None, :], mask=inside, other=0.0)
        bn = tl.load(new + at_v + vv[None, :], mask=inside, other=0.0)
        bx = tl.load(dx + at_v + vv[None, :], mask=inside, other=0.0)
        bv = tl.load(v + at_v + vv[None, :], mask=inside, other=0.0)
        p = tl.dot(bo, tl.trans(bn), p, input_precision=PRECISION)
        m = tl.dot(bx, tl.trans(bn), m, input_precision=PRECISION)
        dbe += tl.sum(bx.to(tl.float32) * bv.to(tl.float32), 1)
    # Two squares at a time, and rows' factors read again for each two: more would not fit the registers.
    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, base * H + hk + c * H, live, PRECISION)
    below = pair_decays(sums, parts, (c[:, None] >= c[None, :]) & live[:, None])
    # Rows of q and k are read as they are: their norms go into the factor that meets them.
    p = p * below * scale * nk[None, :]
    m = tl.where(c[:, None] > c[None, :], -m * below, 0.0) * nk[None, :]
    met, met_k = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for tile in range(0, keys, TK):
        kk = tile + tl.arange(0, TK)
        inside = live[:, None] & (kk < K)[None, :]
        bk = tl.load(k + at + kk[None, :], mask=inside, other=0.0)
        bq = tl.load(q + at + kk[None, :], mask=inside, other=0.0)
        met_k = tl.dot(bk, tl.trans(bk), met_k, input_precision=PRECISION)
        met = tl.dot(bq, tl.trans(bk), met, input_precision=PRECISION)
    met_k = m * met_k * nk[:, None]
    dbe += tl.sum(met_k, 1)
    dgate = between(met_k * bb[:, None] + p * met * nq[:, None], C)
    p, m = p.to(q.dtype.element_ty), (m * bb[:, None]).to(q.dtype.element_ty)

    pt, mt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)  # no product's result is transposed
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        inside = live[:, None] & (vv < V)[None, :]
        bn = tl.load(new + at_v + vv[None, :], mask=inside, other=0.0)
        bo = tl.load(do + at_v + vv[None, :], mask=inside, other=0.0)
        bx = tl.load(dx + at_v + vv[None, :], mask=inside, other=0.0)
        pt = tl.dot(bn, tl.trans(bo), pt, input_precision=PRECISION)
        mt = tl.dot(bn, tl.trans(bx), mt, input_precision=PRECISION)
    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, base * H + hk + c * H, live, PRECISION)
    above = pair_decays(-sums, -parts, (c[:, None] <= c[None, :]) & live[None, :])
    pt = (pt * above * scale * nq[None, :]).to(q.dtype.element_ty)
    m += (tl.where(c[:, None] < c[None, :], -mt * above, 0.0) * (bb * nk)[None, :]).to(q.dtype.element_ty)

    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, base * H + hk + c * H, live, PRECISION)
    end = (base + tl.minimum(C, length - place * C) - 1) * HV + head
    last, last_part = tl.load(b + end), 0.0
    if PRECISION == "tf32x3":
        last_part = tl.load(f + end)
    e, left = tl.exp2(sums + parts), remaining_decay(sums, parts, last, last_part, live)
    db, written, held = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
    for tile in range(0, keys, TK):
        kk = tile + tl.arange(0, TK)
        aq, ak, y = tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32)
        product = tl.zeros((TK,), tl.float32)
        for tile_v in range(0, values, TV):
            vv = tile_v + tl.arange(0, TV)
            inside = live[:, None] & (vv < V)[None, :]
            bo = tl.load(do + at_v + vv[None, :], mask=inside, other=0.0)
            bn = tl.load(new + at_v + vv[None, :], mask=inside, other=0.0)
            bx = tl.load(dx + at_v + vv[None, :], mask=inside, other=0.0)
            at_kv, in_kv = at_state + kk[:, None] * V + vv[None, :], (kk < K)[:, None] & (vv < V)[None, :]
            bs = tl.load(states + at_kv, mask=in_kv, other=0.0)
            bd = tl.load(dstates + at_kv, mask=in_kv, other=0.0)
            product += tl.sum(bs.to(tl.float32) * bd.to(tl.float32), 1)
            bs, bd = bs.to(bo.dtype), bd.to(bo.dtype)
            aq = tl.dot(bo, tl.trans(bs), aq, input_precision=PRECISION)
            ak = tl.dot(bn, tl.trans(bd), ak, input_precision=PRECISION)
            y = tl.dot(bx, tl.trans(bs), y, input_precision=PRECISION)
        inside = live[:, None] & (kk < K)[None, :]
        bq = tl.load(q + at + kk[None, :], mask=inside, other=0.0)
        bk = tl.load(k + at + kk[None, :], mask=inside, other=0.0)
        wq, wk = bq.to(tl.float32) * nq[:, None], bk.to(tl.float32) * nk[:, None]
        aq, ak, y = aq * e[:, None] * scale, ak * left[:, None], -y * e[:, None]
        written += tl.sum(ak * wk, 1)
        held += tl.sum(product, 0)
        dbe += tl.sum(y * wk, 1)
        y = y * bb[:, None]
        db += tl.sum(wq * aq, 1) + tl.sum(y * wk, 1)
        aq = tl.dot(p, bk, aq, input_precision=PRECISION)
        ak = tl.dot(pt, bq, ak + y, input_precision=PRECISION)
        ak = tl.dot(m, bk, ak, input_precision=PRECISION)
        into = (base * HV + head) * K + c[:, None] * (HV * K) + kk[None, :]
        tl.store(dq + into, aq.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + into, ak.to(dk.dtype.element_ty), mask=inside)
    dgate += tl.cumsum(db, 0, reverse=True) + held * tl.exp2(last + last_part)
    dgate += tl.sum(tl.where(c[:, None] > c[None, :], written[None, :], 0.0), 1)
    tl.store(dg + by_row, dgate.to(dg.dtype.element_ty), mask=live)
    tl.store(dbeta + by_row, dbe.to(dbeta.dtype.element_ty), mask=live)
