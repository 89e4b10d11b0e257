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

from halftune_kernels.delta_kernels import (
    at_hand,
    between,
    decay_sums,
    load_sums,
    load_sums_for,
    load_tile,
    pair_decays,
    remaining_decay,
    scan_place,
)


@triton.jit
def _weighted(v, w, at_v, at_row, inside, live):
    """Values times their weights, in the dtype of the values."""
    x = tl.load(v + at_v, mask=inside, other=0.0)
    if w is not None:
        x = (x.to(tl.float32) * tl.load(w + at_row, mask=live, other=0.0).to(tl.float32)[:, None]).to(x.dtype)
    return x


@triton.jit
def prepare(
    q, k, g, p, b, f, table, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """b and P of one chunk and head."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    base = tl.cast(first + place * C, tl.int64)
    c = tl.arange(0, C)
    live = place * C + c < length
    met = tl.zeros((C, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        at = (base * G + head // (H // G)) * K + c[:, None] * (G * K) + kk[None, :]
        inside = live[:, None] & (kk < K)[None, :]
        x, y = tl.load(k + at, mask=inside, other=0.0), tl.load(q + at, mask=inside, other=0.0)
        met = tl.dot(y, tl.trans(x), met, input_precision=PRECISION)
    sums, parts = decay_sums(g + base * H + head + c * H, live)
    tl.store(b + base * H + head + c * H, sums, mask=live)
    tl.store(f + base * H + head + c * H, parts, mask=live)
    decay = pair_decays(sums, parts, c[:, None] >= c[None, :])
    square = (base * H + head) * C + c[:, None] * (H * C) + c[None, :]
    tl.store(p + square, (met * decay * scale).to(p.dtype.element_ty), mask=live[:, None])


@triton.jit
def scan_forward(
    q, k, v, w, b, f, p, o, states, initial, final, table, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of one segment and head, BV columns of the values; keeps the entering states if asked."""
    part, head, segment = scan_place(H, V, BV)
    group, entry = head // (H // G), table + segment * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    at_state = kk[:, None] * V + vv[None, :]
    in_state = (kk < K)[:, None] & (vv < V)[None, :]
    s = tl.zeros((BK, BV), tl.float32)
    if initial is not None:
        s += tl.load(initial + (tl.cast(n, tl.int64) * H + head) * K * V + at_state, mask=in_state, other=0.0)
    for place in range(tl.cdiv(length, C)):
        base = tl.cast(first + place * C, tl.int64)
        live = place * C + c < length
        in_k, in_v = live[:, None] & (kk < K)[None, :], live[:, None] & (vv < V)[None, :]
        at_k = (base * G + group) * K + c[:, None] * (G * K) + kk[None, :]
        at_v = (base * H + head) * V + c[:, None] * (H * V) + vv[None, :]
        by_row = base * H + head + c * H
        bk, bq = load_tile(k, at_k, in_k), load_tile(q, at_k, in_k)
        bv = _weighted(v, w, at_v, by_row, in_v, live)
        square = (base * H + head) * C + c[:, None] * (H * C) + c[None, :]
        bp = load_tile(p, square, live[:, None])
        sums, parts = load_sums(b, f, by_row, live)
        end = (base + tl.minimum(C, length - place * C) - 1) * H + head
        last, last_part = tl.load(b + end), tl.load(f + end)
        left = remaining_decay(sums, parts, last, last_part, live)
        if states is not None:
            into = states + (tl.cast(chunk + place, tl.int64) * H + head) * K * V + at_state
            tl.store(into, s.to(states.dtype.element_ty), mask=in_state)
        bq = at_hand(bq, q, at_k, in_k, PRECISION)
        out = (tl.exp2(sums + parts) * scale)[:, None] * tl.dot(bq, s.to(bv.dtype), input_precision=PRECISION)
        bp = at_hand(bp, p, square, live[:, None], PRECISION)
        out += tl.dot(bp, bv, input_precision=PRECISION)
        tl.store(o + at_v, out.to(o.dtype.element_ty), mask=in_v)
        kept = (bv.to(tl.float32) * left[:, None]).to(bv.dtype)
        bk = at_hand(bk, k, at_k, in_k, PRECISION)
        s = s * tl.exp2(last + last_part) + tl.dot(tl.trans(bk), kept, input_precision=PRECISION)
    if final is not None:
        tl.store(final + (tl.cast(n, tl.int64) * H + head) * K * V + at_state, s, mask=in_state)


@triton.jit
def scan_backward(
    q, k, v, w, b, f, p, do, dv, dws, dstates, dfinal, dinitial, table, scale, rows,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV and each chunk's leaving dS, last chunk first; dws [tiles, rows, H] gets this tile's part of dw."""
    part, head, segment = scan_place(H, V, BV)
    group, entry = head // (H // G), table + segment * 4
    n, chunk, first, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    c, kk, vv = tl.arange(0, C), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    at_state = kk[:, None] * V + vv[None, :]
    in_state = (kk < K)[:, None] & (vv < V)[None, :]
    ds = tl.zeros((BK, BV), tl.float32)
    if dfinal is not None:
        ds += tl.load(dfinal + (tl.cast(n, tl.int64) * H + head) * K * V + at_state, mask=in_state, other=0.0)
    count = tl.cdiv(length, C)
    for done in range(count):
        place = count - 1 - done
        base = tl.cast(first + place * C, tl.int64)
        live = place * C + c < length
        in_k, in_v = live[:, None] & (kk < K)[None, :], live[:, None] & (vv < V)[None, :]
        at_k = (base * G + group) * K + c[:, None] * (G * K) + kk[None, :]
        at_v = (base * H + head) * V + c[:, None] * (H * V) + vv[None, :]
        by_row = base * H + head + c * H
        bk, bq = load_tile(k, at_k, in_k), load_tile(q, at_k, in_k)
        bo = load_tile(do, at_v, in_v)
        square = (base * H + head) * C + c[:, None] * (H * C) + c[None, :]
        bp = load_tile(p, square, live[:, None])
        sums, parts = load_sums(b, f, by_row, live)
        end = (base + tl.minimum(C, length - place * C) - 1) * H + head
        last, last_part = tl.load(b + end), tl.load(f + end)
        left = remaining_decay(sums, parts, last, last_part, live)
        into = dstates + (tl.cast(chunk + place, tl.int64) * H + head) * K * V + at_state
        tl.store(into, ds.to(dstates.dtype.element_ty), mask=in_state)
        bk = at_hand(bk, k, at_k, in_k, PRECISION)
        bx = left[:, None] * tl.dot(bk, ds.to(bo.dtype), input_precision=PRECISION)
        bp = at_hand(bp, p, square, live[:, None], PRECISION)
        bx += tl.dot(tl.trans(bp), bo, input_precision=PRECISION)
        if w is not None:
            bv = tl.load(v + at_v, mask=in_v, other=0.0).to(tl.float32)
            of_part = tl.cast(part, tl.int64) * rows * H
            tl.store(dws + of_part + by_row, tl.sum(bx * bv, 1), mask=live)
            bx = bx * tl.load(w + by_row, mask=live, other=0.0).to(tl.float32)[:, None]
        tl.store(dv + at_v, bx.to(dv.dtype.element_ty), mask=in_v)
        kept = (bo.to(tl.float32) * (tl.exp2(sums + parts) * scale)[:, None]).to(bo.dtype)
        bq = at_hand(bq, q, at_k, in_k, PRECISION)
        ds = ds * tl.exp2(last + last_part) + tl.dot(tl.trans(bq), kept, input_precision=PRECISION)
    if dinitial is not None:
        tl.store(dinitial + (tl.cast(n, tl.int64) * H + head) * K * V + at_state, ds, mask=in_state)


@triton.jit
def chunk_backward(
    q, k, v, w, b, f, do, states, dstates, dq, dk, dg, table, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK (of one value head) and dg of one chunk."""
    entry = table + tl.program_id(0) * 4
    place, first, length = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = tl.program_id(1)
    base = tl.cast(first + place * C, tl.int64)
    c = tl.arange(0, C)
    live = place * C + c < length
    at = (base * G + head // (H // G)) * K + c[:, None] * (G * K)
    rows_v = (base * H + head) * V + c[:, None] * (H * V)
    at_state = (tl.cast(tl.program_id(0), tl.int64) * H + head) * K * V
    by_row = base * H + head + c * H

    p, pt = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for tile in range(0, BV, TV):
        vv = tile + tl.arange(0, TV)
        inside = live[:, None] & (vv < V)[None, :]
        bo = tl.load(do + rows_v + vv[None, :], mask=inside, other=0.0)
        bv = _weighted(v, w, rows_v + vv[None, :], by_row, inside, live)
        p = tl.dot(bo, tl.trans(bv), p, input_precision=PRECISION)
        pt = tl.dot(bv, tl.trans(bo), pt, input_precision=PRECISION)
    # Read after the first sums: as factors of columns they would fill the registers beside them.
    sums, parts = load_sums_for(b, f, by_row, live, PRECISION)
    end = (base + tl.minimum(C, length - place * C) - 1) * H + head
    last, last_part = tl.load(b + end), 0.0
    if PRECISION == "tf32x3":
        last_part = tl.load(f + end)
    both = live[:, None] & live[None, :]
    below = pair_decays(sums, parts, (c[:, None] >= c[None, :]) & both)
    above = pair_decays(-sums, -parts, (c[:, None] <= c[None, :]) & both)
    p, pt = p * below * scale, (pt * above * scale).to(q.dtype.element_ty)
    met = tl.zeros((C, C), tl.float32)
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        inside = live[:, None] & (kk < K)[None, :]
        bq = tl.load(q + at + kk[None, :], mask=inside, other=0.0)
        bk = tl.load(k + at + kk[None, :], mask=inside, other=0.0)
        met = tl.dot(bq, tl.trans(bk), met, input_precision=PRECISION)
    dgate = between(p * met, C)
    p = p.to(q.dtype.element_ty)

    e, left = tl.exp2(sums + parts) * scale, remaining_decay(sums, parts, last, last_part, live)
    db, written, held = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
    for tile in range(0, BK, TK):
        kk = tile + tl.arange(0, TK)
        aq, ak = tl.zeros((C, TK), tl.float32), tl.zeros((C, TK), tl.float32)
        product = tl.zeros((TK,), tl.float32)
        for tile_v in range(0, BV, TV):
            vv = tile_v + tl.arange(0, TV)
            inside = live[:, None] & (vv < V)[None, :]
            bo = tl.load(do + rows_v + vv[None, :], mask=inside, other=0.0)
            bv = _weighted(v, w, rows_v + vv[None, :], by_row, inside, live)
            at_kv, in_kv = at_state + kk[:, None] * V + vv[None, :], (kk < K)[:, None] & (vv < V)[None, :]
            bs = tl.load(states + at_kv, mask=in_kv, other=0.0)
            bd = tl.load(dstates + at_kv, mask=in_kv, other=0.0)
            product += tl.sum(bs.to(tl.float32) * bd.to(tl.float32), 1)
            aq = tl.dot(bo, tl.trans(bs.to(bo.dtype)), aq, input_precision=PRECISION)
            ak = tl.dot(bv, tl.trans(bd.to(bo.dtype)), ak, input_precision=PRECISION)
        inside = live[:, None] & (kk < K)[None, :]
        bq = tl.load(q + at + kk[None, :], mask=inside, other=0.0)
        bk = tl.load(k + at + kk[None, :], mask=inside, other=0.0)
        wq, wk = bq.to(tl.float32), bk.to(tl.float32)
        aq, ak = aq * e[:, None], ak * left[:, None]
        db += tl.sum(wq * aq, 1)
        written += tl.sum(ak * wk, 1)
        held += tl.sum(product, 0)
        aq = tl.dot(p, bk, aq, input_precision=PRECISION)
        ak = tl.dot(pt, bq, ak, input_precision=PRECISION)
        into = (base * H + head) * K + c[:, None] * (H * K) + kk[None, :]
        tl.store(dq + into, aq.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + into, ak.to(dk.dtype.element_ty), mask=inside)
    dgate += tl.cumsum(db, 0, reverse=True) + held * tl.exp2(last + last_part)
    dgate += tl.sum(tl.where(c[:, None] > c[None, :], written[None, :], 0.0), 1)
    tl.store(dg + by_row, dgate.to(dg.dtype.element_ty), mask=live)
