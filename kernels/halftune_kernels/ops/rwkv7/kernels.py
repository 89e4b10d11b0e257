"""Triton kernels of RWKV-7: what is its own beside the scans of ``scan/delta_kernels.py``.

Notation of a chunk of C rows: c inclusive sum of the log decay per channel, e = c - w what is before a row, S the state
that enters (Peng et al., "RWKV-7 Goose", 2025; the chunked form is that of the DPLR delta rule):

    A(x, y)_ij = sum_c x_ic y_jc exp(c_ic - c_jc) for i >= j     A'(x, y)_ij the same with e_ic for c_ic, for i > j
    T = (I - A'(a, b))^-1      W = T (a ∘ exp e)      U = T A'(a, k) V      N = U + W S
    O = scale ((r ∘ exp c) S + A(r, k) V + A(r, b) N)
    S' = exp(c_C) ∘ S + (k ∘ exp(c_C - c))^T V + (b ∘ exp(c_C - c))^T N

Backward, from the scan's dN and the leaving state's dS: X = T^T dN and the gradients of the four matrices,
Erk = scale tril(dO V^T), Erb = scale tril(dO N^T), Eak = tril(X V^T, -1), Eab = tril(X N^T, -1);
dV = scale A(r, k)^T dO + A'(a, k)^T X + (k ∘ exp(c_C - c)) dS. All else is sums over pairs, channel by channel:

    dr_i = scale exp(c_i) (dO S^T)_i + sum_j (Erk_ij k_j + Erb_ij b_j) exp(c_i - c_j)
    da_i = exp(e_i) (X S^T)_i + sum_j (Eak_ij k_j + Eab_ij b_j) exp(e_i - c_j)
    dk_j = exp(c_C - c_j) (V dS^T)_j + sum_i Erk_ij r_i exp(c_i - c_j) + Eak_ij a_i exp(e_i - c_j); db_j of N, Erb, Eab
    dw_t = exp(c_C) rowsum(S dS) + sum_{i>=t} (r dr - k dk' - b db') + sum_{i>t} a da
           + sum_{j<t} exp(c_C - c_j) (k_j (V dS^T)_j + b_j (N dS^T)_j)

with ' the sums over pairs alone. Pairs between which nothing decays (r with its own row, a with its neighbour) have no
part in dw. Decays are formed as in ``kda/kernels.py``. No product's result is transposed: some Triton versions compile
that wrongly.
"""

# pyright: reportGeneralTypeIssues=false
# (a kernel is compiled, not called: pyright sees functions that never return)
from __future__ import annotations

import triton
import triton.language as tl

from halftune_kernels.scan.chunk_kernels import LOG2E, chunk_number, chunk_place, load_rows, tile_at
from halftune_kernels.scan.delta_kernels import (
    block_decays,
    gates,
    half_decays,
    read_back,
    store_inverse_of,
    vector,
)


@triton.jit
def _rows(x, row, live, kk, H: tl.constexpr, K: tl.constexpr):
    return load_rows(x, row, live, kk, H, K).to(tl.float32)


@triton.jit
def _halves(xr, xa, xk, xb, own, before, after, kind: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Of A(r, k), A(r, b), A'(a, k) and A'(a, b) of a block: the pairs of two halves of SIZE rows."""
    rise, rise_until, fall, pairs = half_decays(own, before, after, SIZE)
    xr, xa = (xr * rise).to(kind), (xa * rise_until).to(kind)
    yk, yb = tl.trans((xk * fall).to(kind)), tl.trans((xb * fall).to(kind))
    rk, rb = tl.dot(xr, yk, input_precision=PRECISION), tl.dot(xr, yb, input_precision=PRECISION)
    ak, ab = tl.dot(xa, yk, input_precision=PRECISION), tl.dot(xa, yb, input_precision=PRECISION)
    return tl.where(pairs, rk, 0.0), tl.where(pairs, rb, 0.0), tl.where(pairs, ak, 0.0), tl.where(pairs, ab, 0.0)


@triton.jit
def products(
    r, w, k, a, b, low, ak, rk, rb, re, ae, kl, bl, whole, table, scale,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, TK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of R rows of one chunk and head: rows of the four matrices, and r, a, k, b decayed for the scans.

    ``low`` gets -A'(a, b); rk and rb are scaled."""
    by_head, _key, left = chunk_place(table, H, H, C)
    block = tl.program_id(2)
    start = block * R
    if start >= left:
        return
    i, c = tl.arange(0, R), tl.arange(0, C)
    row, live = start + i, start + i < left
    r, w, k, a, b = r + by_head * K, w + by_head * K, k + by_head * K, a + by_head * K, b + by_head * K
    met_rk, met_rb = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    met_ak, met_ab = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        inside = live[:, None] & (kk < K)[None, :]
        xr, xa = _rows(r, row, live, kk, H, K), _rows(a, row, live, kk, H, K)
        local, rest, earlier, _, before, after = block_decays(w, block, left, kk, H, K, C, R)
        until = tl.cumsum(gates(w, row - 1, (i > 0) & live, kk, H, K), 0)  # local, without its row
        kind = re.dtype.element_ty
        fall, past = tl.exp2(earlier), (c < start) & (c < left)
        near_k, near_b = (_rows(k, c, past, kk, H, K) * fall).to(kind), (_rows(b, c, past, kk, H, K) * fall).to(kind)
        up_r, up_a = (xr * tl.exp2(local)).to(kind), (xa * tl.exp2(until)).to(kind)
        met_rk = tl.dot(up_r, tl.trans(near_k), met_rk, input_precision=PRECISION)
        met_rb = tl.dot(up_r, tl.trans(near_b), met_rb, input_precision=PRECISION)
        met_ak = tl.dot(up_a, tl.trans(near_k), met_ak, input_precision=PRECISION)
        met_ab = tl.dot(up_a, tl.trans(near_b), met_ab, input_precision=PRECISION)
        at, fall = by_head * K + row[:, None] * (H * K) + kk[None, :], tl.exp2(rest + after[None, :])
        tl.store(re + at, (xr * tl.exp2(before[None, :] + local) * scale).to(kind), mask=inside)
        tl.store(ae + at, (xa * tl.exp2(before[None, :] + until)).to(kind), mask=inside)
        tl.store(kl + at, (_rows(k, row, live, kk, H, K) * fall).to(kind), mask=inside)
        tl.store(bl + at, (_rows(b, row, live, kk, H, K) * fall).to(kind), mask=inside)
        if block == 0:
            total = tl.sum(gates(w, i, live, kk, H, K), 0) + after
            tl.store(whole + chunk_number(H) * K + kk, tl.exp2(total), mask=kk < K)
    rows, outside = by_head * C + row[:, None] * (H * C), live[:, None] & ((c < start) | (c >= start + R))[None, :]
    at = rows + c[None, :]
    tl.store(low + at, -met_ab, mask=outside)
    tl.store(ak + at, met_ak.to(ak.dtype.element_ty), mask=outside)
    tl.store(rk + at, (met_rk * scale).to(rk.dtype.element_ty), mask=outside)
    tl.store(rb + at, (met_rb * scale).to(rb.dtype.element_ty), mask=outside)

    # Pairs inside the block by themselves: beside the products above they would not fit the registers.
    own_rk, own_rb = tl.zeros((R, R), tl.float32), tl.zeros((R, R), tl.float32)
    own_ak, own_ab = tl.zeros((R, R), tl.float32), tl.zeros((R, R), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        xr, xa = _rows(r, row, live, kk, H, K), _rows(a, row, live, kk, H, K)
        xk, xb = _rows(k, row, live, kk, H, K), _rows(b, row, live, kk, H, K)
        own, before = gates(w, row, live, kk, H, K), gates(w, row - 1, (i > 0) & live, kk, H, K)
        after = gates(w, row + 1, (i + 1 < R) & (row + 1 < left), kk, H, K)
        own_rk += tl.where(i[:, None] == i[None, :], tl.sum(xr * xk, 1)[:, None], 0.0)
        own_rb += tl.where(i[:, None] == i[None, :], tl.sum(xr * xb, 1)[:, None], 0.0)
        for level in tl.static_range(4):
            near_rk, near_rb, near_ak, near_ab = _halves(
                xr, xa, xk, xb, own, before, after, re.dtype.element_ty, R >> (level + 1), PRECISION
            )
            own_rk, own_rb = own_rk + near_rk, own_rb + near_rb
            own_ak, own_ab = own_ak + near_ak, own_ab + near_ab
    at = rows + row[None, :]
    tl.store(low + at, -own_ab, mask=live[:, None])
    tl.store(ak + at, own_ak.to(ak.dtype.element_ty), mask=live[:, None])
    tl.store(rk + at, (own_rk * scale).to(rk.dtype.element_ty), mask=live[:, None])
    tl.store(rb + at, (own_rb * scale).to(rb.dtype.element_ty), mask=live[:, None])


@triton.jit
def solve(
    low, ak, v, ae, t, w, u, table,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T, W and U of one chunk and head."""
    row, _key, left = chunk_place(table, H, H, C)
    ak, v, ae, w, u, t = ak + row * C, v + row * V, ae + row * K, w + row * K, u + row * V, t + row * C
    store_inverse_of(t, low + row * C, None, left, H, C)
    bt, c = read_back(t, left, H, C), tl.arange(0, C)
    live = c < left
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        at, inside = tile_at(c, live, kk, H, K)
        x = tl.load(ae + at, mask=inside, other=0.0)
        tl.store(w + at, tl.dot(bt, x, input_precision=PRECISION).to(w.dtype.element_ty), mask=inside)
    read = tl.load(ak + c[:, None] * (H * C) + c[None, :], mask=live[:, None], other=0.0)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at, inside = tile_at(c, live, vv, H, V)
        x = tl.dot(read, tl.load(v + at, mask=inside, other=0.0), input_precision=PRECISION).to(bt.dtype)
        tl.store(u + at, tl.dot(bt, x, input_precision=PRECISION).to(u.dtype.element_ty), mask=inside)


@triton.jit
def square_gradients(
    v, t, ak, rk, kl, do, new, dn, dstates, dx, dv, erk, erb, eak, eab, table, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X, dV and the gradients of the four matrices, of one chunk and head."""
    row, _key, left = chunk_place(table, H, H, C)
    number, c = chunk_number(H) * K * V, tl.arange(0, C)
    live = c < left
    square = row * C + c[:, None] * (H * C) + c[None, :]
    brk, brb = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    bak, bab = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        at, inside = row * V + c[:, None] * (H * V) + vv[None, :], live[:, None] & (vv < V)[None, :]
        bt = tl.load(t + square, mask=live[:, None], other=0.0)
        bx = tl.dot(tl.trans(bt), tl.load(dn + at, mask=inside, other=0.0), input_precision=PRECISION)
        bx, bo = bx.to(dx.dtype.element_ty), tl.load(do + at, mask=inside, other=0.0)
        tl.store(dx + at, bx, mask=inside)
        bt = tl.load(rk + square, mask=live[:, None], other=0.0)
        out = tl.dot(tl.trans(bt), bo, input_precision=PRECISION)
        bt = tl.load(ak + square, mask=live[:, None], other=0.0)
        out = tl.dot(tl.trans(bt), bx, out, input_precision=PRECISION)
        for deep in range(0, BK, TK):
            kk = deep + tl.arange(0, TK)
            at_k, in_k = row * K + c[:, None] * (H * K) + kk[None, :], live[:, None] & (kk < K)[None, :]
            at_state, in_state = number + kk[:, None] * V + vv[None, :], (kk < K)[:, None] & (vv < V)[None, :]
            ds = tl.load(dstates + at_state, mask=in_state, other=0.0).to(bo.dtype)
            out = tl.dot(tl.load(kl + at_k, mask=in_k, other=0.0), ds, out, input_precision=PRECISION)
        tl.store(dv + at, out.to(dv.dtype.element_ty), mask=inside)
        bn, bv = tl.load(new + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
        brk = tl.dot(bo, tl.trans(bv), brk, input_precision=PRECISION)
        brb = tl.dot(bo, tl.trans(bn), brb, input_precision=PRECISION)
        bak = tl.dot(bx, tl.trans(bv), bak, input_precision=PRECISION)
        bab = tl.dot(bx, tl.trans(bn), bab, input_precision=PRECISION)
    lower, strict = c[:, None] >= c[None, :], c[:, None] > c[None, :]
    kind = erk.dtype.element_ty
    tl.store(erk + square, tl.where(lower, brk * scale, 0.0).to(kind), mask=live[:, None])
    tl.store(erb + square, tl.where(lower, brb * scale, 0.0).to(kind), mask=live[:, None])
    tl.store(eak + square, tl.where(strict, bak, 0.0).to(kind), mask=live[:, None])
    tl.store(eab + square, tl.where(strict, bab, 0.0).to(kind), mask=live[:, None])


@triton.jit
def _weight(e, row, column, live, H: tl.constexpr, C: tl.constexpr):
    """One entry per row of a matrix of the chunk, as a column."""
    return tl.load(e + row * (H * C) + column, mask=live, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _pairs(
    r, w, k, a, b, erk, erb, eak, eab, kk, count,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """Sums over pairs of rows of one block of ``count`` between which something decays: of r_i, a_i, k_j and b_j."""
    i = tl.arange(0, R)
    live = i < count
    dr, da = tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32)
    run, run_a = tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32)
    for done in range(count):
        j = count - 1 - done
        near_k, near_b = vector(k, None, j, kk, H, K)[None, :], vector(b, None, j, kk, H, K)[None, :]
        by_r = _weight(erk, i, j, live, H, C) * near_k + _weight(erb, i, j, live, H, C) * near_b
        dr += tl.where((i > j)[:, None], tl.exp2(run), 0.0) * by_r
        by_a = _weight(eak, i, j, live, H, C) * near_k + _weight(eab, i, j, live, H, C) * near_b
        da += tl.where((i > j + 1)[:, None], tl.exp2(run_a), 0.0) * by_a
        decay = vector(w, None, j, kk, H, K)[None, :] * LOG2E
        run += tl.where((i >= j)[:, None], decay, 0.0)
        run_a += tl.where((i > j)[:, None], decay, 0.0)
    dk, db, run = tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32), tl.zeros((R, TK), tl.float32)
    for j in range(count):
        far_a = tl.where((i < j - 1)[:, None], tl.exp2(run), 0.0) * vector(a, None, j, kk, H, K)[None, :]
        run += tl.where((i < j)[:, None], vector(w, None, j, kk, H, K)[None, :] * LOG2E, 0.0)
        far_r = tl.where((i < j)[:, None], tl.exp2(run), 0.0) * vector(r, None, j, kk, H, K)[None, :]
        dk += _weight(erk, j, i, live, H, C) * far_r + _weight(eak, j, i, live, H, C) * far_a
        db += _weight(erb, j, i, live, H, C) * far_r + _weight(eab, j, i, live, H, C) * far_a
    return dr, da, dk, db


@triton.jit
def _by_state(
    left, right, state, row, live, kk, values,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of ``left`` and of ``right`` times the transposed state."""
    x, y = tl.zeros((row.shape[0], kk.shape[0]), tl.float32), tl.zeros((row.shape[0], kk.shape[0]), tl.float32)
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        in_state = (kk < K)[None, :] & (vv < V)[:, None]
        one, two = load_rows(left, row, live, vv, H, V), load_rows(right, row, live, vv, H, V)
        s = tl.load(state + kk[None, :] * V + vv[:, None], mask=in_state, other=0.0).to(one.dtype)
        x = tl.dot(one, s, x, input_precision=PRECISION)
        y = tl.dot(two, s, y, input_precision=PRECISION)
    return x, y


@triton.jit
def _held(states, dstates, kk, values, K: tl.constexpr, V: tl.constexpr, TV: tl.constexpr):
    """rowsum(S dS)."""
    total = tl.zeros(kk.shape, tl.float32)
    for tile in range(0, values, TV):
        vv = tile + tl.arange(0, TV)
        at, inside = kk[None, :] * V + vv[:, None], (kk < K)[None, :] & (vv < V)[:, None]
        s, ds = tl.load(states + at, mask=inside, other=0.0), tl.load(dstates + at, mask=inside, other=0.0)
        total += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
    return total


@triton.jit
def _met(e, at, keep, x, PRECISION: tl.constexpr):
    return tl.dot(tl.load(e + at, mask=keep, other=0.0), x, input_precision=PRECISION)


@triton.jit
def chunk_backward(
    r, w, k, v, a, b, do, new, dx, states, dstates, erk, erb, eak, eab, dr, dw, dk, da, db, table, scale, values,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dr, dw, dk, da and db of TK channels of one chunk and head.

    values is V once more: as a constant it would let the compiler unroll the loops, and spill."""
    by_head, _key, left = chunk_place(table, H, H, C)
    r, w, k, a, b = r + by_head * K, w + by_head * K, k + by_head * K, a + by_head * K, b + by_head * K
    erk, erb, eak, eab = erk + by_head * C, erb + by_head * C, eak + by_head * C, eab + by_head * C
    v, do, new, dx = v + by_head * V, do + by_head * V, new + by_head * V, dx + by_head * V
    number = chunk_number(H) * K * V
    states, dstates = states + number, dstates + number
    i, c, kk = tl.arange(0, R), tl.arange(0, C), tl.program_id(2) * TK + tl.arange(0, TK)
    live_c = c < left
    kind = do.dtype.element_ty
    remains = tl.exp2(tl.cumsum(gates(w, c + 1, (c + 1 < C) & (c + 1 < left), kk, H, K), 0, reverse=True))
    by_k, by_b = _by_state(v, new, dstates, c, live_c, kk, values, H, K, V, TV, PRECISION)
    written = remains * (_rows(k, c, live_c, kk, H, K) * by_k + _rows(b, c, live_c, kk, H, K) * by_b)
    beyond = tl.exp2(tl.sum(gates(w, c, live_c, kk, H, K), 0)) * _held(states, dstates, kk, values, K, V, TV)
    blocks = tl.cdiv(tl.minimum(left, C), R)
    for done in range(blocks):
        start = (blocks - 1 - done) * R
        row, live = start + i, start + i < left
        at, inside = tile_at(row, live, kk, H, K)
        local, rest, earlier, later, before, after = block_decays(w, blocks - 1 - done, left, kk, H, K, C, R)
        until = tl.cumsum(gates(w, row - 1, (i > 0) & live, kk, H, K), 0)
        square = start * (H * C) + start
        gr, ga, gk, gb = _pairs(
            r + start * (H * K), w + start * (H * K), k + start * (H * K), a + start * (H * K), b + start * (H * K),
            erk + square, erb + square, eak + square, eab + square, kk, tl.minimum(left - start, R), H, K, C, R, TK,
        )  # fmt: skip

        past, square = live[:, None] & (c < start)[None, :], row[:, None] * (H * C) + c[None, :]
        apart = past & (c[None, :] < row[:, None] - 1)  # not a's neighbour
        x, up, up_a = _rows(k, c, c < start, kk, H, K) * tl.exp2(earlier), tl.exp2(local), tl.exp2(until)
        x = tl.where((c < start)[:, None], x, 0.0).to(kind)
        gr += up * _met(erk, square, past, x, PRECISION)
        ga += up_a * _met(eak, square, apart, x, PRECISION)
        x = tl.where((c < start)[:, None], _rows(b, c, c < start, kk, H, K) * tl.exp2(earlier), 0.0).to(kind)
        gr += up * _met(erb, square, past, x, PRECISION)
        ga += up_a * _met(eab, square, apart, x, PRECISION)

        beside, square = (c >= start + R) & live_c, c[None, :] * (H * C) + row[:, None]
        apart = live[:, None] & beside[None, :] & (c[None, :] > row[:, None] + 1)
        x, fall = (_rows(r, c, beside, kk, H, K) * tl.exp2(later)).to(kind), tl.exp2(rest)
        gk += fall * _met(erk, square, live[:, None] & beside[None, :], x, PRECISION)
        gb += fall * _met(erb, square, live[:, None] & beside[None, :], x, PRECISION)
        later = tl.cumsum(gates(w, c - 1, (c > start + R) & live_c, kk, H, K), 0)  # without its row
        x = (_rows(a, c, beside, kk, H, K) * tl.exp2(later)).to(kind)
        gk += fall * _met(eak, square, apart, x, PRECISION)
        gb += fall * _met(eab, square, apart, x, PRECISION)

        one, two = _by_state(do, dx, states, row, live, kk, values, H, K, V, TV, PRECISION)
        gr += one * scale * tl.exp2(before[None, :] + local)
        ga += two * tl.exp2(before[None, :] + until)
        xr, xa, xk = _rows(r, row, live, kk, H, K), _rows(a, row, live, kk, H, K), _rows(k, row, live, kk, H, K)
        xb = _rows(b, row, live, kk, H, K)
        through, ahead = xr * gr - xk * gk - xb * gb, xa * ga
        # Sums over the rows that a decay is between, never differences: a decay of nearly everything would drown in the
        # rounding of what it had no part in.
        sums = tl.dot(tl.where(row[:, None] > c[None, :], 1.0, 0.0), written, input_precision="tf32x3")
        sums = tl.dot(tl.where(i[:, None] < i[None, :], 1.0, 0.0), ahead, sums, input_precision="tf32x3")
        sums += beyond[None, :] + tl.cumsum(through, 0, reverse=True)
        tl.store(dw + by_head * K + at, sums.to(dw.dtype.element_ty), mask=inside)
        beyond += tl.sum(through + ahead, 0)

        one, two = _by_state(v, new, dstates, row, live, kk, values, H, K, V, TV, PRECISION)
        fall = tl.exp2(rest + after[None, :])
        gk, gb = gk + one * fall, gb + two * fall
        # pairs between which nothing decays: r with its own row, a with the row before it
        own_k, own_b = _weight(erk, row, row, live, H, C), _weight(erb, row, row, live, H, C)
        gr += own_k * xk + own_b * xb
        gk, gb = gk + own_k * xr, gb + own_b * xr
        second, follows = live & (row > 0), (row + 1 < C) & (row + 1 < left)
        ga += _weight(eak, row, row - 1, second, H, C) * _rows(k, row - 1, second, kk, H, K)
        ga += _weight(eab, row, row - 1, second, H, C) * _rows(b, row - 1, second, kk, H, K)
        xa = _rows(a, row + 1, follows, kk, H, K)
        gk += _weight(eak, row + 1, row, follows, H, C) * xa
        gb += _weight(eab, row + 1, row, follows, H, C) * xa
        tl.store(dr + by_head * K + at, gr.to(dr.dtype.element_ty), mask=inside)
        tl.store(da + by_head * K + at, ga.to(da.dtype.element_ty), mask=inside)
        tl.store(dk + by_head * K + at, gk.to(dk.dtype.element_ty), mask=inside)
        tl.store(db + by_head * K + at, gb.to(db.dtype.element_ty), mask=inside)
