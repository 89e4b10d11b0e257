"""Triton kernels of Kimi delta attention: what is its own beside the scans of ``scan/delta_kernels.py``.

Notation of a chunk of C rows (Kimi Team, "Kimi Linear", 2025): b inclusive sum of the log decay per channel, S the
state that enters, B = diag(beta), A(x, y)_ij = sum_c x_ic y_jc exp(b_ic - b_jc) for i >= j.

    T = (I + tril(B A(K, K), -1))^-1     W = -T B (K ∘ exp b)     U = T B V     P = scale tril(A(Q, K))
    N = U + W S      O = scale (Q ∘ exp b) S + P N      S' = exp(b_C) ∘ S + (K ∘ exp(b_C - b))^T N

Backward, from the scan's dN and the leaving state's dS: dX = T^T dN, dV = B dX, and gradients of A(Q, K) and of A(K, K)
before beta, E = scale tril(dO N^T) and F = -tril(dX N^T, -1). All else is sums over pairs of rows, channel by channel:

    Y_i = -exp(b_i) (dX S^T)_i + sum_j F_ij K_j exp(b_i - b_j)                    dbeta_i = <dX_i, V_i> + <Y_i, K_i>
    dQ_i = scale exp(b_i) (dO S^T)_i + sum_j E_ij K_j exp(b_i - b_j)
    Z_j = exp(b_C - b_j) (N dS^T)_j + sum_i (E_ij Q_i + beta_i F_ij K_i) exp(b_i - b_j)      dK = B Y + Z
    dg_t = exp(b_C) rowsum(S dS) + sum_{i>=t} Q dQ + B K Y - K Z' + sum_{j<t} K_j exp(b_C - b_j) (N dS^T)_j

with Z' the sum over pairs in Z alone.

exp(b_i - b_j) has no factors that hold over a chunk: exp(-b_j) overflows. Between blocks of R rows it has two,
measured from the start of the later block. So it has between the halves of a block, between their halves, and so on;
the backward pass forms it pair by pair there, from a running sum. No exponent is positive. No product's result is
transposed: some Triton versions compile that wrongly.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

import triton
import triton.language as tl

from halftune_kernels.scan.chunk_kernels import LOG2E, chunk_number, chunk_place, load_rows, row_factor, tile_at
from halftune_kernels.scan.delta_kernels import (
    block_decays,
    gates,
    half_decays,
    read_back,
    store_inverse_of,
    vector,
)


@triton.jit
def _unit_rows(x, norm, row, live, kk, H: tl.constexpr, K: tl.constexpr):
    """Rows of q or k, times their norms' inverses if there are any."""
    return load_rows(x, row, live, kk, H, K).to(tl.float32) * row_factor(norm, row * H, live)[:, None]


@triton.jit
def _halves(xq, xk, own, after, kind: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Of A(Q, K) and A(K, K) of a block: the pairs of two halves of SIZE rows."""
    rise, _, fall, pairs = half_decays(own, own, after, SIZE)
    y = tl.trans((xk * fall).to(kind))
    by_q = tl.dot((xq * rise).to(kind), y, input_precision=PRECISION)
    by_k = tl.dot((xk * rise).to(kind), y, input_precision=PRECISION)
    return tl.where(pairs, by_q, 0.0), tl.where(pairs, by_k, 0.0)


@triton.jit
def products(
    q, k, g, rq, rk, a, p, qe, ke, kl, whole, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, TK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of R rows of one chunk and head: rows of A(K, K) and of P, and of Q, K decayed for the scans."""
    by_head, key, left = chunk_place(table, H, HV, C)
    block = tl.program_id(2)
    start = block * R
    if start >= left:
        return
    i, c = tl.arange(0, R), tl.arange(0, C)
    row, live, near_c = start + i, start + i < left, (c < start) & (c < left)
    q, k, g = q + key * K, k + key * K, g + by_head * K
    nq, nk = row_factor(rq, key + row * H, live), row_factor(rk, key + row * H, live)
    nc = row_factor(rk, key + c * H, c < left)
    met_q, met_k = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        xq = load_rows(q, row, live, kk, H, K).to(tl.float32) * nq[:, None]
        xk = load_rows(k, row, live, kk, H, K).to(tl.float32) * nk[:, None]
        y = load_rows(k, c, near_c, kk, H, K).to(tl.float32) * nc[:, None]
        local, rest, earlier, _, before, after = block_decays(g, block, left, kk, HV, K, C, R)
        rise = tl.exp2(local)
        y = (y * tl.exp2(earlier)).to(qe.dtype.element_ty)
        met_q = tl.dot((xq * rise).to(y.dtype), tl.trans(y), met_q, input_precision=PRECISION)
        met_k = tl.dot((xk * rise).to(y.dtype), tl.trans(y), met_k, input_precision=PRECISION)
        into, inside = tile_at(row, live, kk, HV, K)
        into = by_head * K + into
        rise = tl.exp2(before[None, :] + local)
        tl.store(qe + into, (xq * rise * scale).to(qe.dtype.element_ty), mask=inside)
        tl.store(ke + into, (xk * rise).to(ke.dtype.element_ty), mask=inside)
        tl.store(kl + into, (xk * tl.exp2(rest + after[None, :])).to(kl.dtype.element_ty), mask=inside)
        if block == 0:
            total = tl.sum(gates(g, i, live, kk, HV, K), 0) + after
            tl.store(whole + chunk_number(HV) * K + kk, tl.exp2(total), mask=kk < K)
    rows = by_head * C + row[:, None] * (HV * C)
    outside = live[:, None] & ((c < start) | (c >= start + R))[None, :]
    tl.store(p + rows + c[None, :], (met_q * scale).to(p.dtype.element_ty), mask=outside)
    tl.store(a + rows + c[None, :], met_k, mask=outside)

    # Pairs inside the block by themselves: beside the products above they would not fit the registers.
    own_q, own_k = tl.zeros((R, R), tl.float32), tl.zeros((R, R), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        xq = load_rows(q, row, live, kk, H, K).to(tl.float32) * nq[:, None]
        xk = load_rows(k, row, live, kk, H, K).to(tl.float32) * nk[:, None]
        own = gates(g, row, live, kk, HV, K)
        after = gates(g, row + 1, (i + 1 < R) & (row + 1 < left), kk, HV, K)
        own_q += tl.where(i[:, None] == i[None, :], tl.sum(xq * xk, 1)[:, None], 0.0)
        for level in tl.static_range(4):
            near_q, near_k = _halves(xq, xk, own, after, qe.dtype.element_ty, R >> (level + 1), PRECISION)
            own_q, own_k = own_q + near_q, own_k + near_k
    tl.store(p + rows + row[None, :], (own_q * scale).to(p.dtype.element_ty), mask=live[:, None])
    tl.store(a + rows + row[None, :], own_k, mask=live[:, None])


@triton.jit
def solve(
    a, beta, v, ke, t, w, u, table,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T, W and U of one chunk and head."""
    row, _key, left = chunk_place(table, HV, HV, C)
    beta, v, ke, w, u, t = beta + row, v + row * V, ke + row * K, w + row * K, u + row * V, t + row * C
    store_inverse_of(t, a + row * C, beta, left, HV, C)
    bt, c = read_back(t, left, HV, C), tl.arange(0, C)
    live = c < left
    factor = row_factor(beta, c * HV, live)[:, None]
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        at, inside = tile_at(c, live, kk, HV, K)
        x = (tl.load(ke + at, mask=inside, other=0.0).to(tl.float32) * -factor).to(bt.dtype)
        tl.store(w + at, tl.dot(bt, x, input_precision=PRECISION).to(w.dtype.element_ty), mask=inside)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at, inside = tile_at(c, live, vv, HV, V)
        x = (tl.load(v + at, mask=inside, other=0.0).to(tl.float32) * factor).to(bt.dtype)
        tl.store(u + at, tl.dot(bt, x, input_precision=PRECISION).to(u.dtype.element_ty), mask=inside)


@triton.jit
def square_gradients(
    v, beta, t, do, new, dn, dx, dv, e, f, dbetas, table, scale,
    HV: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX, dV, E and F of one chunk and head, and the part <dX, V> of dbeta."""
    row, _key, left = chunk_place(table, HV, HV, C)
    c = tl.arange(0, C)
    live = c < left
    b = row_factor(beta, row + c * HV, live)[:, None]
    square = row * C + c[:, None] * (HV * C) + c[None, :]
    bt = tl.load(t + square, mask=live[:, None], other=0.0)
    be, bf, part = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at, inside = row * V + c[:, None] * (HV * V) + vv[None, :], live[:, None] & (vv < V)[None, :]
        bn, bo = tl.load(new + at, mask=inside, other=0.0), tl.load(do + at, mask=inside, other=0.0)
        bx = tl.dot(tl.trans(bt), tl.load(dn + at, mask=inside, other=0.0), input_precision=PRECISION)
        part += tl.sum(bx * tl.load(v + at, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(dv + at, (bx * b).to(dv.dtype.element_ty), mask=inside)
        half = bx.to(dx.dtype.element_ty)
        tl.store(dx + at, half, mask=inside)
        be = tl.dot(bo, tl.trans(bn), be, input_precision=PRECISION)
        bf = tl.dot(half, tl.trans(bn), bf, input_precision=PRECISION)
    be = tl.where(c[:, None] >= c[None, :], be * scale, 0.0)
    bf = tl.where(c[:, None] > c[None, :], -bf, 0.0)
    tl.store(e + square, be.to(e.dtype.element_ty), mask=live[:, None])
    tl.store(f + square, bf.to(f.dtype.element_ty), mask=live[:, None])
    tl.store(dbetas + row + c * HV, part, mask=live)


@triton.jit
def _pairs(
    q, k, g, rq, rk, e, f, beta, kk, count,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Sums over pairs of rows of one block of ``count``, i after j: of Q_i, of K_i (before beta), and of K_j."""
    i = tl.arange(0, R)
    dq, dy, dz = tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32)
    run = tl.zeros((R, TK), tl.float32)  # from after row j through row i
    for done in range(count):
        j = count - 1 - done
        near = vector(k, rk, j, kk, H, K)
        near = tl.where((i > j)[:, None], tl.exp2(run), 0.0) * near[None, :]
        dq += tl.load(e + i * (HV * C) + j, mask=i < count, other=0.0).to(tl.float32)[:, None] * near
        dy += tl.load(f + i * (HV * C) + j, mask=i < count, other=0.0).to(tl.float32)[:, None] * near
        run += tl.where((i >= j)[:, None], vector(g, None, j, kk, HV, K)[None, :] * LOG2E, 0.0)
    run = tl.zeros((R, TK), tl.float32)
    for j in range(count):
        run += tl.where((i < j)[:, None], vector(g, None, j, kk, HV, K)[None, :] * LOG2E, 0.0)
        far_q = vector(q, rq, j, kk, H, K)
        far_k = vector(k, rk, j, kk, H, K) * tl.load(beta + j * HV).to(tl.float32)
        by_q = tl.load(e + j * (HV * C) + i).to(tl.float32)[:, None] * far_q[None, :]
        by_k = tl.load(f + j * (HV * C) + i).to(tl.float32)[:, None] * far_k[None, :]
        dz += tl.where((i < j)[:, None], tl.exp2(run), 0.0) * (by_q + by_k)
    return dq, dy, dz


@triton.jit
def _by_state(
    do, new, dx, states, dstates, row, live, kk,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr,
    TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of dO S^T, dX S^T and N dS^T."""
    dq, dy, dz = tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at_state, in_state = kk[None, :] * V + vv[:, None], (kk < K)[None, :] & (vv < V)[:, None]
        bo, bn = load_rows(do, row, live, vv, HV, V), load_rows(new, row, live, vv, HV, V)
        s = tl.load(states + at_state, mask=in_state, other=0.0).to(bo.dtype)
        ds = tl.load(dstates + at_state, mask=in_state, other=0.0).to(bo.dtype)
        dq = tl.dot(bo, s, dq, input_precision=PRECISION)
        dy = tl.dot(load_rows(dx, row, live, vv, HV, V), s, dy, input_precision=PRECISION)
        dz = tl.dot(bn, ds, dz, input_precision=PRECISION)
    return dq, dy, dz


@triton.jit
def _through(
    k, rk, g, new, states, dstates, left, kk,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """K_j exp(b_C - b_j) (N dS^T)_j of all rows [C, k], and exp(b_C) rowsum(S dS) [k]."""
    c = tl.arange(0, C)
    live = c < left
    dz, held = tl.zeros((C, TK), tl.float32), tl.zeros((TK,), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at_state, in_state = kk[None, :] * V + vv[:, None], (kk < K)[None, :] & (vv < V)[:, None]
        bn, ds = load_rows(new, c, live, vv, HV, V), tl.load(dstates + at_state, mask=in_state, other=0.0)
        s = tl.load(states + at_state, mask=in_state, other=0.0)
        held += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
        dz = tl.dot(bn, ds.to(bn.dtype), dz, input_precision=PRECISION)
    rest = tl.cumsum(gates(g, c + 1, (c + 1 < C) & (c + 1 < left), kk, HV, K), 0, reverse=True)
    x = _unit_rows(k, rk, c, live, kk, H, K)
    return x * tl.exp2(rest) * dz, held * tl.exp2(tl.sum(gates(g, c, live, kk, HV, K), 0))


@triton.jit
def chunk_backward(
    q, k, g, beta, rq, rk, do, new, dx, states, dstates, e, f, dq, dk, dg, dbetas, table, scale, rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and dK (of the unit rows of one value head) and dg of TK channels of one chunk, and their part of dbeta."""
    by_head, key, left = chunk_place(table, H, HV, C)
    q, k = q + key * K, k + key * K
    if rq is not None:
        rq, rk = rq + key, rk + key
    g, beta, e, f = g + by_head * K, beta + by_head, e + by_head * C, f + by_head * C
    do, new, dx = do + by_head * V, new + by_head * V, dx + by_head * V
    number = chunk_number(HV) * K * V
    states, dstates = states + number, dstates + number
    dbetas += tl.cast(tl.program_id(2) + 1, tl.int64) * rows * HV + by_head
    i, c, kk = tl.arange(0, R), tl.arange(0, C), tl.program_id(2) * TK + tl.arange(0, TK)
    written, beyond = _through(k, rk, g, new, states, dstates, left, kk, H, HV, K, V, C, BV, TK, TV, PRECISION)
    blocks = tl.cdiv(tl.minimum(left, C), R)
    for done in range(blocks):
        block = blocks - 1 - done
        start = block * R
        row, live = start + i, start + i < left
        local, rest, earlier, later, before, after = block_decays(g, block, left, kk, HV, K, C, R)
        aq, y, z = _by_state(do, new, dx, states, dstates, row, live, kk, HV, K, V, R, BV, TK, TV, PRECISION)
        rise = tl.exp2(before[None, :] + local)
        aq, y, left_behind = aq * rise * scale, -y * rise, z * tl.exp2(rest + after[None, :])

        x = _unit_rows(k, rk, c, c < left, kk, H, K)
        near = tl.where((c < start)[:, None], x * tl.exp2(earlier), 0.0).to(do.dtype.element_ty)
        at, before_row = row[:, None] * (HV * C) + c[None, :], live[:, None] & (c < start)[None, :]
        be, bf = tl.load(e + at, mask=before_row, other=0.0), tl.load(f + at, mask=before_row, other=0.0)
        rise = tl.exp2(local)
        aq += rise * tl.dot(be, near, input_precision=PRECISION)
        y += rise * tl.dot(bf, near, input_precision=PRECISION)
        fall, after_row = tl.exp2(later), live[:, None] & ((c >= start + R) & (c < left))[None, :]
        x = x * row_factor(beta, c * HV, c < left)[:, None] * fall
        at = c[None, :] * (HV * C) + row[:, None]
        far = tl.dot(tl.load(f + at, mask=after_row, other=0.0), x.to(do.dtype.element_ty), input_precision=PRECISION)
        x = _unit_rows(q, rq, c, c < left, kk, H, K) * fall
        be = tl.load(e + at, mask=after_row, other=0.0)
        far = tl.dot(be, x.to(do.dtype.element_ty), far, input_precision=PRECISION)
        z = far * tl.exp2(rest)

        at = start * (H * K)
        own_rq, own_rk = rq, rk
        if rq is not None:
            own_rq, own_rk = rq + start * H, rk + start * H
        square = start * (HV * C) + start
        pair_q, pair_y, pair_z = _pairs(
            q + at, k + at, g + start * (HV * K), own_rq, own_rk, e + square, f + square, beta + start * HV, kk,
            tl.minimum(left - start, R), H, HV, K, C, R, TK,
        )  # fmt: skip
        aq, y, z = aq + pair_q, y + pair_y, z + pair_z
        xq, xk = _unit_rows(q, rq, row, live, kk, H, K), _unit_rows(k, rk, row, live, kk, H, K)
        tl.store(dbetas + row * HV, tl.sum(y * xk, 1), mask=live)
        y = y * row_factor(beta, row * HV, live)[:, None]
        db = xq * aq + xk * (y - z)
        at, inside = tile_at(row, live, kk, HV, K)
        # What a row leaves in the state decays in the rows after it only: summed over those, not subtracted from all,
        # so that a decay of nearly everything does not drown in the rounding of what it had no part in.
        earlier_rows = tl.where(row[:, None] > c[None, :], 1.0, 0.0)
        sums = tl.dot(earlier_rows, written, input_precision="tf32x3")
        sums += beyond[None, :] + tl.cumsum(db, 0, reverse=True)
        tl.store(dg + by_head * K + at, sums.to(dg.dtype.element_ty), mask=inside)
        beyond += tl.sum(db, 0)  # of later rows
        # a row with itself decays by nothing, so the decay has no part in it
        own = tl.load(e + row * (HV * C) + row, mask=live, other=0.0).to(tl.float32)[:, None]
        tl.store(dq + by_head * K + at, (aq + own * xk).to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + by_head * K + at, (y + z + left_behind + own * xq).to(dk.dtype.element_ty), mask=inside)
