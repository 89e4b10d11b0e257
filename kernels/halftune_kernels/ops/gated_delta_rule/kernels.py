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

from halftune_kernels.scan.chunk_kernels import (
    at_hand,
    begin_scan,
    between,
    chunk_decays,
    chunk_number,
    chunk_place,
    decay_gradient,
    decay_sums,
    load_rows,
    load_sums,
    load_tile,
    pair_decays,
    row_factor,
    scan_chunk,
    state_decays,
    store_state,
    tile_at,
)
from halftune_kernels.scan.delta_kernels import store_inverse, unit_inverse


@triton.jit
def _keys(k, row: tl.constexpr, kk, left, H: tl.constexpr, K: tl.constexpr):
    i = row * 16 + tl.arange(0, 16)
    return load_rows(k, i, i < left, kk, H, K)


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
    row, key, left = chunk_place(table, H, HV, C)
    c = tl.arange(0, C)
    live = c < left
    q, k = q + key * K, k + key * K
    met, nq, nk = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        x, y = load_rows(k, c, live, kk, H, K), load_rows(q, c, live, kk, H, K)
        met = tl.dot(y, tl.trans(x), met, input_precision=PRECISION)
        nq, nk = nq + _square(y), nk + _square(x)
    by_row = row + c * HV
    sums, parts = decay_sums(g + by_row, live)
    tl.store(b + by_row, sums, mask=live)
    tl.store(f + by_row, parts, mask=live)
    met = met * pair_decays(sums, parts, c[:, None] >= c[None, :]) * scale
    if rk is not None:
        nq, nk = _inverse_norm(nq), _inverse_norm(nk)
        met = _scaled(met, nq, nk)
        if tl.program_id(1) % (HV // H) == 0:
            tl.store(rk + key + c * H, nk, mask=live)
            tl.store(rq + key + c * H, nq, mask=live)
    tl.store(p + row * C + c[:, None] * (HV * C) + c[None, :], met.to(p.dtype.element_ty), mask=live[:, None])
    tl.debug_barrier()  # b and f are read back in pieces
    _store_inverse(t + row * C, b + row, f + row, k, beta + row, rk, left, H, HV, K, C, BK, TK, PRECISION)


@triton.jit
def scan_forward(
    q, k, v, b, f, beta, t, p, rq, rk, o, new, states, initial, final, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    here, s = begin_scan(table, initial, HV, K, V, BK, BV)
    kind = k.dtype.element_ty
    for place in range(tl.cdiv(here.length, C)):
        now = scan_chunk(here, place, H, HV, K, V, C)
        bk, bq = load_tile(k, now.at_k, now.in_k), load_tile(q, now.at_k, now.in_k)
        nk, nq = row_factor(rk, now.by_key, now.live), row_factor(rq, now.by_key, now.live) * scale
        bv = tl.load(v + now.at_v, mask=now.in_v, other=0.0).to(tl.float32)
        bt, bp = load_tile(t, now.at_c, now.in_c), load_tile(p, now.at_c, now.in_c)
        e, left, whole = chunk_decays(b, f, now, HV, C)
        bb = row_factor(beta, now.by_row, now.live)
        store_state(states, now.number, here, s, HV, K, V)
        half = s.to(kind)
        x = bb[:, None] * (bv - (e * nk)[:, None] * tl.dot(at_hand(bk, PRECISION), half, input_precision=PRECISION))
        fresh = tl.dot(at_hand(bt, PRECISION), x.to(kind), input_precision=PRECISION)
        out = (e * nq)[:, None] * tl.dot(at_hand(bq, PRECISION), half, input_precision=PRECISION)
        out += tl.dot(at_hand(bp, PRECISION), fresh.to(kind), input_precision=PRECISION)
        tl.store(o + now.at_v, out.to(o.dtype.element_ty), mask=now.in_v)
        if states is not None:
            tl.store(new + now.at_v, fresh.to(new.dtype.element_ty), mask=now.in_v)
        kept = (fresh * (left * nk)[:, None]).to(kind)
        s = s * whole + tl.dot(tl.trans(at_hand(bk, PRECISION)), kept, input_precision=PRECISION)
    store_state(final, here.segment, here, s, HV, K, V)


@triton.jit
def scan_backward(
    q, k, b, f, beta, t, p, rq, rk, do, dv, dx, dstates, dfinal, dinitial, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX, dV and each chunk's leaving dS, from the last chunk to the first."""
    here, ds = begin_scan(table, dfinal, HV, K, V, BK, BV)
    kind = k.dtype.element_ty
    count = tl.cdiv(here.length, C)
    for done in range(count):
        now = scan_chunk(here, count - 1 - done, H, HV, K, V, C)
        bk, bq = load_tile(k, now.at_k, now.in_k), load_tile(q, now.at_k, now.in_k)
        nk, nq = row_factor(rk, now.by_key, now.live), row_factor(rq, now.by_key, now.live) * scale
        bo = tl.load(do + now.at_v, mask=now.in_v, other=0.0)
        bt, bp = load_tile(t, now.at_c, now.in_c), load_tile(p, now.at_c, now.in_c)
        e, left, whole = chunk_decays(b, f, now, HV, C)
        bb = row_factor(beta, now.by_row, now.live)
        store_state(dstates, now.number, here, ds, HV, K, V)
        dn = (left * nk)[:, None] * tl.dot(at_hand(bk, PRECISION), ds.to(kind), input_precision=PRECISION)
        dn += tl.dot(tl.trans(at_hand(bp, PRECISION)), bo, input_precision=PRECISION)
        bx = tl.dot(tl.trans(at_hand(bt, PRECISION)), dn.to(kind), input_precision=PRECISION)
        tl.store(dx + now.at_v, bx.to(dx.dtype.element_ty), mask=now.in_v)
        bx = bx * bb[:, None]
        tl.store(dv + now.at_v, bx.to(dv.dtype.element_ty), mask=now.in_v)
        ds = ds * whole
        ds += tl.dot(
            tl.trans(at_hand(bq, PRECISION)),
            (bo.to(tl.float32) * (e * nq)[:, None]).to(kind),
            input_precision=PRECISION,
        )
        ds -= tl.dot(tl.trans(at_hand(bk, PRECISION)), (bx * (e * nk)[:, None]).to(kind), input_precision=PRECISION)
    store_state(dinitial, here.segment, here, ds, HV, K, V)


@triton.jit
def _row_factors(b, f, beta, rq, rk, at, at_k, live, PRECISION: tl.constexpr):
    """b, f, beta and 1 / norm of q and k; the barrier keeps the compiler from holding those of an earlier call."""
    tl.debug_barrier()
    sums, parts = load_sums(b, f, at, live, PRECISION == "tf32x3")
    return sums, parts, row_factor(beta, at, live), row_factor(rq, at_k, live), row_factor(rk, at_k, live)


@triton.jit
def chunk_backward(
    q, k, v, b, f, beta, rq, rk, do, new, dx, states, dstates, dq, dk, dg, dbeta, table, scale, keys, values,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and dK of one chunk and value head (of the unit rows), dg and dbeta.

    keys and values are K and V once more: as constants they would let the compiler unroll the loops, and spill."""
    row, key, left_rows = chunk_place(table, H, HV, C)
    c = tl.arange(0, C)
    live = c < left_rows
    q, k, v, do, new, dx = q + key * K, k + key * K, v + row * V, do + row * V, new + row * V, dx + row * V
    state = chunk_number(HV) * K * V
    states, dstates, dq, dk = states + state, dstates + state, dq + row * K, dk + row * K
    by_row, by_key = row + c * HV, key + c * H

    p, m, dbe = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        bo, bn = load_rows(do, c, live, vv, HV, V), load_rows(new, c, live, vv, HV, V)
        bx, bv = load_rows(dx, c, live, vv, HV, V), load_rows(v, c, live, vv, HV, V)
        p = tl.dot(bo, tl.trans(bn), p, input_precision=PRECISION)
        m = tl.dot(bx, tl.trans(bn), m, input_precision=PRECISION)
        dbe += tl.sum(bx.to(tl.float32) * bv.to(tl.float32), 1)
    # Two squares at a time, and rows' factors read again for each two: more would not fit the registers.
    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, by_key, live, PRECISION)
    below = pair_decays(sums, parts, (c[:, None] >= c[None, :]) & live[:, None])
    # Rows of q and k are read as they are: their norms go into the factor that meets them.
    p = p * below * scale * nk[None, :]
    m = tl.where(c[:, None] > c[None, :], -m * below, 0.0) * nk[None, :]
    met, met_k = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for tile in range(0, keys, TK):
        kk = tile + tl.arange(0, TK)
        bk, bq = load_rows(k, c, live, kk, H, K), load_rows(q, c, live, kk, H, K)
        met_k = tl.dot(bk, tl.trans(bk), met_k, input_precision=PRECISION)
        met = tl.dot(bq, tl.trans(bk), met, input_precision=PRECISION)
    met_k = m * met_k * nk[:, None]
    dbe += tl.sum(met_k, 1)
    dgate = between(met_k * bb[:, None] + p * met * nq[:, None], C)
    p, m = p.to(q.dtype.element_ty), (m * bb[:, None]).to(q.dtype.element_ty)

    # dQ by itself: P held until dK is formed would not fit the registers.
    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, by_key, live, PRECISION)
    e, left, whole = state_decays(sums, parts, b, f, row, left_rows, live, HV, C, PRECISION == "tf32x3")
    db = tl.zeros((C,), tl.float32)
    for tile in range(0, keys, TK):
        kk = tile + tl.arange(0, TK)
        aq = tl.zeros((C, TK), tl.float32)
        for tile_v in range(0, values, TV):
            vv = tile_v + tl.arange(0, TV)
            bo, bs = load_rows(do, c, live, vv, HV, V), load_rows(states, kk, kk < K, vv, 1, V)
            aq = tl.dot(bo, tl.trans(bs.to(bo.dtype)), aq, input_precision=PRECISION)
        bk, bq = load_rows(k, c, live, kk, H, K), load_rows(q, c, live, kk, H, K)
        aq = aq * e[:, None] * scale
        db += tl.sum(bq.to(tl.float32) * nq[:, None] * aq, 1)
        aq = tl.dot(p, bk, aq, input_precision=PRECISION)
        into, inside = tile_at(c, live, kk, HV, K)
        tl.store(dq + into, aq.to(dq.dtype.element_ty), mask=inside)

    pt, mt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)  # no product's result is transposed
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        bn, bo = load_rows(new, c, live, vv, HV, V), load_rows(do, c, live, vv, HV, V)
        bx = load_rows(dx, c, live, vv, HV, V)
        pt = tl.dot(bn, tl.trans(bo), pt, input_precision=PRECISION)
        mt = tl.dot(bn, tl.trans(bx), mt, input_precision=PRECISION)
    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, by_key, live, PRECISION)
    above = pair_decays(-sums, -parts, (c[:, None] <= c[None, :]) & live[None, :])
    pt = (pt * above * scale * nq[None, :]).to(q.dtype.element_ty)
    m += (tl.where(c[:, None] < c[None, :], -mt * above, 0.0) * (bb * nk)[None, :]).to(q.dtype.element_ty)

    sums, parts, bb, nq, nk = _row_factors(b, f, beta, rq, rk, by_row, by_key, live, PRECISION)
    e, left, whole = state_decays(sums, parts, b, f, row, left_rows, live, HV, C, PRECISION == "tf32x3")
    written, held = tl.zeros((C,), tl.float32), 0.0
    for tile in range(0, keys, TK):
        kk = tile + tl.arange(0, TK)
        ak, y = tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32)
        product = tl.zeros((TK,), tl.float32)
        for tile_v in range(0, values, TV):
            vv = tile_v + tl.arange(0, TV)
            bn, bx = load_rows(new, c, live, vv, HV, V), load_rows(dx, c, live, vv, HV, V)
            bs, bd = load_rows(states, kk, kk < K, vv, 1, V), load_rows(dstates, kk, kk < K, vv, 1, V)
            product += tl.sum(bs.to(tl.float32) * bd.to(tl.float32), 1)
            ak = tl.dot(bn, tl.trans(bd.to(bn.dtype)), ak, input_precision=PRECISION)
            y = tl.dot(bx, tl.trans(bs.to(bn.dtype)), y, input_precision=PRECISION)
        bq, bk = load_rows(q, c, live, kk, H, K), load_rows(k, c, live, kk, H, K)
        wk = bk.to(tl.float32) * nk[:, None]
        ak, y = ak * left[:, None], -y * e[:, None]
        written += tl.sum(ak * wk, 1)
        held += tl.sum(product, 0)
        dbe += tl.sum(y * wk, 1)
        y = y * bb[:, None]
        db += tl.sum(y * wk, 1)
        ak = tl.dot(pt, bq, ak + y, input_precision=PRECISION)
        ak = tl.dot(m, bk, ak, input_precision=PRECISION)
        into, inside = tile_at(c, live, kk, HV, K)
        tl.store(dk + into, ak.to(dk.dtype.element_ty), mask=inside)
    dgate = decay_gradient(dgate, db, written, held * whole, C)
    tl.store(dg + by_row, dgate.to(dg.dtype.element_ty), mask=live)
    tl.store(dbeta + by_row, dbe.to(dbeta.dtype.element_ty), mask=live)
