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
little and wait for little. N and dX are stored, one row of values each per token and head: with them the third backward
kernel needs neither T nor W = T B K nor U = T B V, every product there is of tiles read from memory, and no product's
result is ever transposed, which some Triton versions compile wrongly. Norms of q and k are factors of rows and columns,
so that tiles go from memory to the products as they are. Exponents are at most 0; sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halftune_kernels.delta_kernels import LOG2E, row_factor, unit_inverse


@triton.jit
def solve(
    q, k, g, beta, t, p, b, rq, rk, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TK: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """T of one chunk and head.

    Stores what the scans need and do not depend on the state: b, T * D and P = scale Q K^T * D. If rq and rk are given,
    they get 1 / norm of the rows of q and k, and these count as divided by theirs."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    base = tl.cast(first + place * C, tl.int64)
    c = tl.arange(0, C)
    live = place * C + c < length
    hk = head // (HV // H)
    low, met = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    nq, nk = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        at = (base * H + hk) * K + c[:, None] * (H * K) + kk[None, :]
        inside = live[:, None] & (kk < K)[None, :]
        x, y = tl.load(k + at, mask=inside, other=0.0), tl.load(q + at, mask=inside, other=0.0)
        low = tl.dot(x, tl.trans(x), low, input_precision=PRECISION)
        met = tl.dot(y, tl.trans(x), met, input_precision=PRECISION)
        wq, wk = y.to(tl.float32), x.to(tl.float32)
        nq += tl.sum(wq * wq, 1)
        nk += tl.sum(wk * wk, 1)
    by_row = base * HV + head + c * HV
    sums = tl.cumsum(tl.load(g + by_row, mask=live, other=0.0).to(tl.float32), 0) * LOG2E
    tl.store(b + by_row, sums, mask=live)
    decay = tl.exp2(tl.where(c[:, None] >= c[None, :], sums[:, None] - sums[None, :], float("-inf")))
    low = low * tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)[:, None]
    met = met * decay * scale
    if rk is not None:
        nq, nk = 1.0 / tl.sqrt(nq + 1e-6), 1.0 / tl.sqrt(nk + 1e-6)
        low = low * nk[:, None] * nk[None, :]
        met = met * nq[:, None] * nk[None, :]
        if head % (HV // H) == 0:
            tl.store(rk + base * H + hk + c * H, nk, mask=live)
            tl.store(rq + base * H + hk + c * H, nq, mask=live)
    square = (base * HV + head) * C + c[:, None] * (HV * C) + c[None, :]
    tl.store(p + square, met.to(p.dtype.element_ty), mask=live[:, None])
    low = tl.where(c[:, None] > c[None, :], low, 0.0)
    inverse = unit_inverse(low, C, LEVELS)
    tl.store(t + square, (inverse * decay).to(t.dtype.element_ty), mask=live[:, None])


@triton.jit
def scan_forward(
    q, k, v, b, beta, t, p, rq, rk, o, new, states, initial, final, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps N and the entering states if asked."""
    head, hk = tl.program_id(1), tl.program_id(1) // (HV // H)
    entry = table + tl.program_id(2) * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
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
        bk = tl.load(k + (base * H + hk) * K + at_k, mask=in_k, other=0.0)
        bq = tl.load(q + (base * H + hk) * K + at_k, mask=in_k, other=0.0)
        nk = row_factor(rk, base * H + hk + c * H, live)
        nq = row_factor(rq, base * H + hk + c * H, live) * scale
        bv = tl.load(v + (base * HV + head) * V + at_v, mask=in_v, other=0.0).to(tl.float32)
        at_t = c[:, None] * (HV * C) + c[None, :]
        bt = tl.load(t + (base * HV + head) * C + at_t, mask=live[:, None], other=0.0)
        bp = tl.load(p + (base * HV + head) * C + at_t, mask=live[:, None], other=0.0)
        by_row = base * HV + head + c * HV
        sums = tl.load(b + by_row, mask=live, other=0.0)
        last = tl.load(b + (base + tl.minimum(C, length - place * C) - 1) * HV + head)
        bb = tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)
        e, left = tl.exp2(sums), tl.where(live, tl.exp2(last - sums), 0.0)
        if states is not None:
            into = states + (tl.cast(chunk + place, tl.int64) * HV + head) * K * V + at_state
            tl.store(into, s.to(states.dtype.element_ty), mask=in_state)
        half = s.to(bk.dtype)
        x = bb[:, None] * (bv - (e * nk)[:, None] * tl.dot(bk, half, input_precision=PRECISION))
        fresh = tl.dot(bt, x.to(bk.dtype), input_precision=PRECISION)
        out = (e * nq)[:, None] * tl.dot(bq, half, input_precision=PRECISION)
        out += tl.dot(bp, fresh.to(bk.dtype), input_precision=PRECISION)
        tl.store(o + (base * HV + head) * V + at_v, out.to(o.dtype.element_ty), mask=in_v)
        if states is not None:
            tl.store(new + (base * HV + head) * V + at_v, fresh.to(new.dtype.element_ty), mask=in_v)
        kept = (fresh * (left * nk)[:, None]).to(bk.dtype)
        s = s * tl.exp2(last) + tl.dot(tl.trans(bk), kept, input_precision=PRECISION)
    if final is not None:
        tl.store(final + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, s, mask=in_state)


@triton.jit
def scan_backward(
    q, k, b, beta, t, p, rq, rk, do, dv, dx, dstates, dfinal, dinitial, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX, dV and each chunk's leaving dS, from the last chunk to the first."""
    head, hk = tl.program_id(1), tl.program_id(1) // (HV // H)
    entry = table + tl.program_id(2) * 4
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
        base = tl.cast(first + place * C, tl.int64)
        live = place * C + c < length
        in_k, in_v = live[:, None] & (kk < K)[None, :], live[:, None] & (vv < V)[None, :]
        at_k, at_v = c[:, None] * (H * K) + kk[None, :], c[:, None] * (HV * V) + vv[None, :]
        bk = tl.load(k + (base * H + hk) * K + at_k, mask=in_k, other=0.0)
        bq = tl.load(q + (base * H + hk) * K + at_k, mask=in_k, other=0.0)
        nk = row_factor(rk, base * H + hk + c * H, live)
        nq = row_factor(rq, base * H + hk + c * H, live) * scale
        bo = tl.load(do + (base * HV + head) * V + at_v, mask=in_v, other=0.0)
        at_t = c[:, None] * (HV * C) + c[None, :]
        bt = tl.load(t + (base * HV + head) * C + at_t, mask=live[:, None], other=0.0)
        bp = tl.load(p + (base * HV + head) * C + at_t, mask=live[:, None], other=0.0)
        by_row = base * HV + head + c * HV
        sums = tl.load(b + by_row, mask=live, other=0.0)
        last = tl.load(b + (base + tl.minimum(C, length - place * C) - 1) * HV + head)
        bb = tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)
        e, left = tl.exp2(sums), tl.where(live, tl.exp2(last - sums), 0.0)
        into = dstates + (tl.cast(chunk + place, tl.int64) * HV + head) * K * V + at_state
        tl.store(into, ds.to(dstates.dtype.element_ty), mask=in_state)
        dn = (left * nk)[:, None] * tl.dot(bk, ds.to(bk.dtype), input_precision=PRECISION)
        dn += tl.dot(tl.trans(bp), bo, input_precision=PRECISION)
        bx = tl.dot(tl.trans(bt), dn.to(bk.dtype), input_precision=PRECISION)
        tl.store(dx + (base * HV + head) * V + at_v, bx.to(dx.dtype.element_ty), mask=in_v)
        bx = bx * bb[:, None]
        tl.store(dv + (base * HV + head) * V + at_v, bx.to(dv.dtype.element_ty), mask=in_v)
        ds = ds * tl.exp2(last)
        ds += tl.dot(tl.trans(bq), (bo.to(tl.float32) * (e * nq)[:, None]).to(bk.dtype), input_precision=PRECISION)
        ds -= tl.dot(tl.trans(bk), (bx * (e * nk)[:, None]).to(bk.dtype), input_precision=PRECISION)
    if dinitial is not None:
        tl.store(dinitial + (tl.cast(n, tl.int64) * HV + head) * K * V + at_state, ds, mask=in_state)


@triton.jit
def chunk_backward(
    q, k, v, b, beta, rq, rk, do, new, dx, states, dstates, dq, dk, dg, dbeta, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and dK of one chunk and value head (of the unit rows), dg and dbeta."""
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
    last = tl.load(b + (base + tl.minimum(C, length - place * C) - 1) * HV + head)
    sums = tl.load(b + by_row, mask=live, other=0.0)
    bb = tl.load(beta + by_row, mask=live, other=0.0).to(tl.float32)
    e, left = tl.exp2(sums), tl.where(live, tl.exp2(last - sums), 0.0)
    nq, nk = row_factor(rq, base * H + hk + c * H, live), row_factor(rk, base * H + hk + c * H, live)

    p, pt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    m, mt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    dbe = tl.zeros((C,), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        inside = live[:, None] & (vv < V)[None, :]
        bo = tl.load(do + at_v + vv[None, :], mask=inside, other=0.0)
        bn = tl.load(new + at_v + vv[None, :], mask=inside, other=0.0)
        bx = tl.load(dx + at_v + vv[None, :], mask=inside, other=0.0)
        bv = tl.load(v + at_v + vv[None, :], mask=inside, other=0.0)
        p = tl.dot(bo, tl.trans(bn), p, input_precision=PRECISION)
        pt = tl.dot(bn, tl.trans(bo), pt, input_precision=PRECISION)
        m = tl.dot(bx, tl.trans(bn), m, input_precision=PRECISION)
        mt = tl.dot(bn, tl.trans(bx), mt, input_precision=PRECISION)
        dbe += tl.sum(bx.to(tl.float32) * bv.to(tl.float32), 1)
    both = live[:, None] & live[None, :]
    below = tl.exp2(tl.where((c[:, None] >= c[None, :]) & both, sums[:, None] - sums[None, :], float("-inf")))
    above = tl.exp2(tl.where((c[:, None] <= c[None, :]) & both, sums[None, :] - sums[:, None], float("-inf")))
    # Rows of q and k are read as they are: their norms go into the factor that meets them.
    p = (p * below * scale * nk[None, :]).to(q.dtype.element_ty)
    pt = (pt * above * scale * nq[None, :]).to(q.dtype.element_ty)
    m = tl.where(c[:, None] > c[None, :], -m * below, 0.0)
    mt = (tl.where(c[:, None] < c[None, :], -mt * above, 0.0) * (bb * nk)[None, :]).to(q.dtype.element_ty)
    kk_dot = tl.zeros((C, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        bk = tl.load(k + at + kk[None, :], mask=live[:, None] & (kk < K)[None, :], other=0.0)
        kk_dot = tl.dot(bk, tl.trans(bk), kk_dot, input_precision=PRECISION)
    kk_dot = kk_dot * nk[:, None] * nk[None, :]
    dbe += tl.sum(m * kk_dot, 1)
    m = m * bb[:, None]
    db = tl.sum(m * kk_dot, 1) - tl.sum(m * kk_dot, 0)
    m = (m * nk[None, :]).to(q.dtype.element_ty)

    through = tl.zeros((C,), tl.float32)  # what the last row's b gets
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        aq, ak, y = tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32)
        product = tl.zeros((TK,), tl.float32)
        for tile_v in range(0, BV, TV):
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
        aq = aq * e[:, None] * scale + tl.dot(p, bk, input_precision=PRECISION)
        ak = ak * left[:, None]
        through += tl.sum(ak * wk, 1) + tl.where(c == 0, tl.sum(product, 0) * tl.exp2(last), 0.0)
        ak += tl.dot(pt, bq, input_precision=PRECISION)
        y = -y * e[:, None]
        dbe += tl.sum(y * wk, 1)
        y = y * bb[:, None]
        db += tl.sum(wq * aq, 1) - tl.sum(wk * ak, 1) + tl.sum(y * wk, 1)
        ak += y + tl.dot(m, bk, input_precision=PRECISION) + tl.dot(mt, bk, input_precision=PRECISION)
        into = (base * HV + head) * K + c[:, None] * (HV * K) + kk[None, :]
        tl.store(dq + into, aq.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + into, ak.to(dk.dtype.element_ty), mask=inside)
    dgate = tl.cumsum(db, 0, reverse=True) + tl.sum(through, 0)
    tl.store(dg + by_row, dgate.to(dg.dtype.element_ty), mask=live)
    tl.store(dbeta + by_row, dbe.to(dbeta.dtype.element_ty), mask=live)
