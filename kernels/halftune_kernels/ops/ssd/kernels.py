"""Triton kernels of simple decay: two forward, two backward. Formulas and notation: see ``cpu.py``.

What does not depend on the state (b, and P = scale Q K^T * D) is computed for all chunks at once; the scans then hold
little and wait for little. b is kept as an fp32 number and what its rounding left (f).
No product's result is transposed: some Triton versions compile that wrongly. Exponents are
at most 0; sums are fp32.
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


@triton.jit
def _weighted(x, w, at, live):
    """Values of rows times their weights, in the dtype of the values."""
    if w is not None:
        x = (x.to(tl.float32) * row_factor(w, at, live)[:, None]).to(x.dtype)
    return x


@triton.jit
def prepare(
    q, k, g, p, b, f, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """b and P of one chunk and head."""
    row, key, left = chunk_place(table, H, HV, C)
    met, c = tl.zeros((C, C), tl.float32), tl.arange(0, C)
    live = c < left
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        x, y = load_rows(k + key * K, c, live, kk, H, K), load_rows(q + key * K, c, live, kk, H, K)
        met = tl.dot(y, tl.trans(x), met, input_precision=PRECISION)
    sums, parts = decay_sums(g + row + c * HV, live)
    tl.store(b + row + c * HV, sums, mask=live)
    tl.store(f + row + c * HV, parts, mask=live)
    met = met * pair_decays(sums, parts, c[:, None] >= c[None, :]) * scale
    tl.store(p + row * C + c[:, None] * (HV * C) + c[None, :], met.to(p.dtype.element_ty), mask=live[:, None])


@triton.jit
def scan_forward(
    q, k, v, w, b, f, p, o, states, initial, final, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps the entering states if asked."""
    here, s = begin_scan(table, initial, HV, K, V, BK, BV)
    for place in range(tl.cdiv(here.length, C)):
        now = scan_chunk(here, place, H, HV, K, V, C)
        bk, bq = load_tile(k, now.at_k, now.in_k), load_tile(q, now.at_k, now.in_k)
        bv = _weighted(tl.load(v + now.at_v, mask=now.in_v, other=0.0), w, now.by_row, now.live)
        bp = load_tile(p, now.at_c, now.in_c)
        e, left, whole = chunk_decays(b, f, now, HV, C)
        store_state(states, now.number, here, s, HV, K, V)
        out = (e * scale)[:, None] * tl.dot(at_hand(bq, PRECISION), s.to(bv.dtype), input_precision=PRECISION)
        out += tl.dot(at_hand(bp, PRECISION), bv, input_precision=PRECISION)
        tl.store(o + now.at_v, out.to(o.dtype.element_ty), mask=now.in_v)
        kept = (bv.to(tl.float32) * left[:, None]).to(bv.dtype)
        s = s * whole + tl.dot(tl.trans(at_hand(bk, PRECISION)), kept, input_precision=PRECISION)
    store_state(final, here.segment, here, s, HV, K, V)


@triton.jit
def scan_backward(
    q, k, v, w, b, f, p, do, dv, dws, dstates, dfinal, dinitial, table, scale, rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV and each chunk's leaving dS, last chunk first; dws [tiles, rows, HV] gets this tile's part of dw."""
    here, ds = begin_scan(table, dfinal, HV, K, V, BK, BV)
    count = tl.cdiv(here.length, C)
    for done in range(count):
        now = scan_chunk(here, count - 1 - done, H, HV, K, V, C)
        bk, bq = load_tile(k, now.at_k, now.in_k), load_tile(q, now.at_k, now.in_k)
        bo = tl.load(do + now.at_v, mask=now.in_v, other=0.0)
        bp = load_tile(p, now.at_c, now.in_c)
        e, left, whole = chunk_decays(b, f, now, HV, C)
        store_state(dstates, now.number, here, ds, HV, K, V)
        bx = left[:, None] * tl.dot(at_hand(bk, PRECISION), ds.to(bo.dtype), input_precision=PRECISION)
        bx += tl.dot(tl.trans(at_hand(bp, PRECISION)), bo, input_precision=PRECISION)
        if w is not None:
            bv = tl.load(v + now.at_v, mask=now.in_v, other=0.0).to(tl.float32)
            tl.store(dws + tl.cast(here.part, tl.int64) * rows * HV + now.by_row, tl.sum(bx * bv, 1), mask=now.live)
            bx = bx * row_factor(w, now.by_row, now.live)[:, None]
        tl.store(dv + now.at_v, bx.to(dv.dtype.element_ty), mask=now.in_v)
        kept = (bo.to(tl.float32) * (e * scale)[:, None]).to(bo.dtype)
        ds = ds * whole + tl.dot(tl.trans(at_hand(bq, PRECISION)), kept, input_precision=PRECISION)
    store_state(dinitial, here.segment, here, ds, HV, K, V)


@triton.jit
def chunk_backward(
    q, k, v, w, b, f, do, states, dstates, dq, dk, dg, table, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK (of one value head) and dg of one chunk."""
    row, key, left_rows = chunk_place(table, H, HV, C)
    c = tl.arange(0, C)
    live = c < left_rows
    q, k, v, do, dq, dk = q + key * K, k + key * K, v + row * V, do + row * V, dq + row * K, dk + row * K
    state = chunk_number(HV) * K * V
    states, dstates, by_row = states + state, dstates + state, row + c * HV

    p, pt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        bo = load_rows(do, c, live, vv, HV, V)
        bv = _weighted(load_rows(v, c, live, vv, HV, V), w, by_row, live)
        p = tl.dot(bo, tl.trans(bv), p, input_precision=PRECISION)
        pt = tl.dot(bv, tl.trans(bo), pt, input_precision=PRECISION)
    # Read after the first sums: as factors of columns they would fill the registers beside them.
    sums, parts = load_sums(b, f, by_row, live, PRECISION == "tf32x3")
    both = live[:, None] & live[None, :]
    below = pair_decays(sums, parts, (c[:, None] >= c[None, :]) & both)
    above = pair_decays(-sums, -parts, (c[:, None] <= c[None, :]) & both)
    p, pt = p * below * scale, (pt * above * scale).to(q.dtype.element_ty)
    met = tl.zeros((C, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        bq, bk = load_rows(q, c, live, kk, H, K), load_rows(k, c, live, kk, H, K)
        met = tl.dot(bq, tl.trans(bk), met, input_precision=PRECISION)
    dgate = between(p * met, C)
    p = p.to(q.dtype.element_ty)

    e, left, whole = state_decays(sums, parts, b, f, row, left_rows, live, HV, C, PRECISION == "tf32x3")
    e = e * scale
    db, written, held = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        aq, ak = tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32)
        product = tl.zeros((TK,), tl.float32)
        for tile_v in range(0, BV, TV):
            vv = tile_v + tl.arange(0, TV)
            bo = load_rows(do, c, live, vv, HV, V)
            bv = _weighted(load_rows(v, c, live, vv, HV, V), w, by_row, live)
            bs, bd = load_rows(states, kk, kk < K, vv, 1, V), load_rows(dstates, kk, kk < K, vv, 1, V)
            product += tl.sum(bs.to(tl.float32) * bd.to(tl.float32), 1)
            aq = tl.dot(bo, tl.trans(bs.to(bo.dtype)), aq, input_precision=PRECISION)
            ak = tl.dot(bv, tl.trans(bd.to(bo.dtype)), ak, input_precision=PRECISION)
        bq, bk = load_rows(q, c, live, kk, H, K), load_rows(k, c, live, kk, H, K)
        wq, wk = bq.to(tl.float32), bk.to(tl.float32)
        aq, ak = aq * e[:, None], ak * left[:, None]
        db += tl.sum(wq * aq, 1)
        written += tl.sum(ak * wk, 1)
        held += tl.sum(product, 0)
        aq = tl.dot(p, bk, aq, input_precision=PRECISION)
        ak = tl.dot(pt, bq, ak, input_precision=PRECISION)
        into, inside = tile_at(c, live, kk, HV, K)
        tl.store(dq + into, aq.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + into, ak.to(dk.dtype.element_ty), mask=inside)
    dgate = decay_gradient(dgate, db, written, held * whole, C)
    tl.store(dg + by_row, dgate.to(dg.dtype.element_ty), mask=live)
