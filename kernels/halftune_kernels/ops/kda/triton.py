"""Kimi delta attention on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels import delta_kernels
from halftune_kernels.arguments import Segments, chunk_table, segment_table
from halftune_kernels.cuts import configuration
from halftune_kernels.delta_arguments import DeltaRule
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div, dot_precision, power_of_two, start
from halftune_kernels.ops.kda import kernels

CHUNK = 64
BLOCK = 16  # rows between which decays have factors
# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md).
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("products", True): ((256, (), Config(0, 4, 1, 32)),),
    ("products", False): ((256, (), Config(0, 4, 1, 32)),),
    ("solve", True): ((256, (), Config(64, 4, 1, 64)),),
    ("solve", False): ((256, (), Config(32, 4, 1, 32)),),
    ("scan_forward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("square_gradients", True): ((256, (), Config(32, 8, 1)),),
    ("square_gradients", False): ((256, (), Config(16, 8, 1)),),
    ("chunk_backward", True): ((256, (), Config(32, 8, 1, 32)),),
    ("chunk_backward", False): ((256, (), Config(32, 8, 1, 32)),),
}
_ROWS = Config(width=0, warps=4, stages=1)  # of the kernels that go row by row


def kda(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.kda.kda`."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    return _KimiDelta.apply(q, k, v, g, beta, initial_state, scale, segments, normalise, want_final)


class _Prepared(NamedTuple):
    """What the scans read and what does not depend on the state; see ``kernels.py``.

    Attributes:
        rq: [B, T, H] 1 / norm of the queries, None if they are taken as they are.
        rk: the same of the keys.
        t: [B, T, HV, C].
        p: [B, T, HV, C].
        q: [B, T, HV, K] scaled queries, decayed from the entering state.
        w: [B, T, HV, K].
        u: [B, T, HV, V].
        k: [B, T, HV, K] keys, decayed to the leaving state.
        whole: [chunks, HV, K] fp32, decay of all rows.
    """

    rq: torch.Tensor | None
    rk: torch.Tensor | None
    t: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor
    whole: torch.Tensor


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    scale: float, segments: Segments, normalise: bool,
) -> _Prepared:  # fmt: skip
    """All chunks at once; done again for the backward pass, which costs less than the memory would."""
    batch, length, heads, width = v.shape
    groups, size = q.shape[2:]
    padded, chunks = power_of_two(size), chunk_table(segments, CHUNK, q.device)
    rq = rk = None
    if normalise:
        rq, rk = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
        rows, tall = rq.numel(), max(1, 2048 // padded)
        given = (q, k, rq, rk, rows)
        start(delta_kernels.norms, (ceil_div(rows, tall),), _ROWS, *given, K=size, BK=padded, M=tall)
    how = {"HV": heads, "K": size, "C": CHUNK, "BK": padded, "PRECISION": dot_precision(q.dtype)}
    a = q.new_empty(batch, length, heads, CHUNK, dtype=torch.float32)
    t, p = (q.new_empty(a.shape) for _ in range(2))
    rising, keys, w, falling = (q.new_empty(batch, length, heads, size) for _ in range(4))
    whole, u = q.new_empty(len(chunks), heads, size, dtype=torch.float32), torch.empty_like(v)
    cut = configuration(CONFIGS, "kda", "products", q, padded)
    given = (q, k, g, rq, rk, a, p, rising, keys, falling, whole, chunks, scale)
    grid = (len(chunks), heads, CHUNK // BLOCK)
    start(kernels.products, grid, cut, *given, H=groups, R=BLOCK, TK=min(cut.depth, padded), **how)
    cut = configuration(CONFIGS, "kda", "solve", q, padded)
    tiles = {"V": width, "BV": power_of_two(width), "TK": min(cut.depth, padded)}
    tiles["TV"] = min(cut.width, tiles["BV"])
    start(kernels.solve, (len(chunks), heads), cut, a, beta, v, keys, t, w, u, chunks, **tiles, **how)
    return _Prepared(rq, rk, t, p, rising, w, u, falling, whole)


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, initial, scale, segments, normalise, want_final):
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        initial = None if initial is None else initial.contiguous()
        heads, width = v.shape[2:]
        size, padded = q.shape[3], power_of_two(q.shape[3])
        made, table = _prepare(q, k, v, g, beta, scale, segments, normalise), segment_table(segments, CHUNK, q.device)
        states = new = None
        if any(ctx.needs_input_grad):
            states = q.new_empty(len(made.whole), heads, size, width, dtype=_state_dtype(q.dtype))
            new = torch.empty_like(v)
            ctx.save_for_backward(q, k, v, g, beta, new, states, initial)
            ctx.scale, ctx.segments, ctx.normalise = scale, segments, normalise
            ctx.set_materialize_grads(False)
        final = q.new_empty(segments.count, heads, size, width, dtype=torch.float32) if want_final else None
        o = torch.empty_like(v)
        cut = configuration(CONFIGS, "kda", "scan_forward", q, padded)
        how = {"HV": heads, "K": size, "V": width, "C": CHUNK, "BK": padded, "BV": cut.width}
        given = (made.q, made.p, made.w, made.u, made.k, made.whole, None, None, None)
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        start(
            delta_kernels.scan_forward, grid, cut, *given, o, new, states, initial, final, table,
            PRECISION=dot_precision(q.dtype), **how,
        )  # fmt: skip
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):
        q, k, v, g, beta, new, states, initial = ctx.saved_tensors
        scale, segments = ctx.scale, ctx.segments
        heads, width = v.shape[2:]
        size, padded = q.shape[3], power_of_two(q.shape[3])
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        made = _prepare(q, k, v, g, beta, scale, segments, ctx.normalise)
        chunks, table = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)
        how = {"HV": heads, "V": width, "C": CHUNK, "PRECISION": dot_precision(q.dtype)}

        dn, dstates = torch.empty_like(v), torch.empty_like(states)
        dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
        cut = configuration(CONFIGS, "kda", "scan_backward", q, padded)
        given = (made.q, made.p, made.w, made.k, made.whole, do, dn, dstates, dfinal, dinitial, table)
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        start(delta_kernels.scan_backward, grid, cut, *given, K=size, BK=padded, BV=cut.width, **how)

        last = configuration(CONFIGS, "kda", "chunk_backward", q, padded)
        deep = min(last.depth, padded)
        tiles_k = ceil_div(size, deep)
        dx, dv, rows = torch.empty_like(v), torch.empty_like(v), q.shape[0] * q.shape[1]
        e, f = torch.empty_like(made.p), torch.empty_like(made.p)
        dbetas = beta.new_empty(1 + tiles_k, *beta.shape, dtype=torch.float32)
        cut = configuration(CONFIGS, "kda", "square_gradients", q, padded)
        tiles = {"BV": power_of_two(width), "TV": min(cut.width, power_of_two(width))}
        given = (v, beta, made.t, do, new, dn, dx, dv, e, f, dbetas, chunks, scale)
        start(kernels.square_gradients, (len(chunks), heads), cut, *given, **tiles, **how)

        # fp32: the sum over value heads and the way back through the norm may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], size, dtype=torch.float32) for _ in range(2))
        dg, tiles["TV"] = torch.empty_like(g), min(last.width, tiles["BV"])
        how |= {"H": q.shape[2], "K": size}
        given = (q, k, g, beta, made.rq, made.rk, do, new, dx, states, dstates, e, f, dqs, dks, dg, dbetas, chunks)
        grid = (len(chunks), heads, tiles_k)
        start(kernels.chunk_backward, grid, last, *given, scale, rows, R=BLOCK, TK=deep, **tiles, **how)

        dq, dk, tall = torch.empty_like(q), torch.empty_like(k), max(1, 2048 // padded)
        kept = {"H": q.shape[2], "HV": heads, "K": size, "BK": padded, "M": tall, "NORM": ctx.normalise}
        grid = (ceil_div(rows, tall), q.shape[2], 2)
        start(delta_kernels.reduce_heads, grid, _ROWS, q, k, dqs, dks, dq, dk, rows, **kept)
        if dinitial is not None and initial is not None:
            dinitial = dinitial.to(initial.dtype)
        return dq, dk, dv, dg, dbetas.sum(0).to(beta.dtype), dinitial, None, None, None, None


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the states kept for the backward pass: fp16 would overflow where little decays."""
    return dtype if dtype == torch.bfloat16 else torch.float32
