"""Simple decay on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import chunk_table, segment_table
from halftune_kernels.cuts import configuration
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div, dot_precision, power_of_two, start
from halftune_kernels.ops.ssd import SimpleDecay, kernels

CHUNK = 64
# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md): fits the shared memory, least spills.
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("prepare", True): ((256, (), Config(0, 4, 1, 32)),),
    ("prepare", False): ((256, (), Config(0, 4, 1, 32)),),
    ("scan_forward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("chunk_backward", True): ((256, (90, 100), Config(64, 8, 1, 32)), (256, (), Config(32, 8, 1, 32))),
    ("chunk_backward", False): ((256, (90, 100), Config(16, 8, 1, 16)), (256, (), Config(16, 4, 1, 16))),
}


def simple_decay(call: SimpleDecay) -> tuple[torch.Tensor, torch.Tensor]:
    """See `halftune_kernels.ops.ssd.simple_decay`."""
    q, k, v, g, w, scale, initial_state, segments, output_dtype = call
    return _SimpleDecay.apply(q, k, v, g, w, initial_state, scale, segments, output_dtype)


class _SimpleDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, g, w, initial, scale, segments, output_dtype):
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        w, initial = (None if x is None else x.contiguous() for x in (w, initial))
        batch, length, heads, width = v.shape
        size = q.shape[3]
        how = {"G": q.shape[2], "H": heads, "K": size, "C": CHUNK, "BK": power_of_two(size)}
        how["PRECISION"] = dot_precision(q.dtype)
        chunks, table = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)
        p = q.new_empty(batch, length, heads, CHUNK)
        b, f = (q.new_empty(batch, length, heads, dtype=torch.float32) for _ in range(2))
        cut = configuration(CONFIGS, "ssd", "prepare", q, how["BK"])
        grid = (len(chunks), heads)
        start(kernels.prepare, grid, cut, q, k, g, p, b, f, chunks, scale, TK=min(cut.depth, how["BK"]), **how)

        keep = any(ctx.needs_input_grad)
        kept = torch.float32 if q.dtype == torch.float16 else q.dtype  # fp16 would overflow where little decays
        states = q.new_empty(len(chunks), heads, size, width, dtype=kept) if keep else None
        final = q.new_empty(segments.count, heads, size, width, dtype=torch.float32)
        o = torch.empty_like(v, dtype=output_dtype)
        cut = configuration(CONFIGS, "ssd", "scan_forward", q, how["BK"])
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        given = (q, k, v, w, b, f, p, o, states, initial, final, table, scale)
        start(kernels.scan_forward, grid, cut, *given, V=width, BV=cut.width, **how)
        if keep:
            ctx.save_for_backward(q, k, v, g, w, b, f, p, states, initial)
            ctx.scale, ctx.segments, ctx.how = scale, segments, how
            ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):
        q, k, v, g, w, b, f, p, states, initial = ctx.saved_tensors
        how, scale, segments = ctx.how, ctx.scale, ctx.segments
        heads, width = v.shape[2:]
        do = torch.zeros_like(v) if do is None else do.to(v.dtype).contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        chunks, table = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)
        cut = configuration(CONFIGS, "ssd", "scan_backward", q, how["BK"])
        tiles_v, rows = ceil_div(width, cut.width), q.shape[0] * q.shape[1]
        dv, dstates = torch.empty_like(v), torch.empty_like(states)
        dws = None if w is None else q.new_empty(tiles_v, *w.shape, dtype=torch.float32)
        dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
        given = (q, k, v, w, b, f, p, do, dv, dws, dstates, dfinal, dinitial, table, scale, rows)
        grid = (tiles_v * heads * segments.count,)
        start(kernels.scan_backward, grid, cut, *given, V=width, BV=cut.width, **how)

        # fp32: the sum over value heads may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], how["K"], dtype=torch.float32) for _ in range(2))
        dg = torch.empty_like(g)
        cut = configuration(CONFIGS, "ssd", "chunk_backward", q, how["BK"])
        tiles = {"BV": power_of_two(width), "TK": min(cut.depth, how["BK"])}
        tiles["TV"] = min(cut.width, tiles["BV"])
        given = (q, k, v, w, b, f, do, states, dstates, dqs, dks, dg, chunks, scale)
        start(kernels.chunk_backward, (len(chunks), heads), cut, *given, V=width, **tiles, **how)
        dq, dk = (x.unflatten(2, (how["G"], -1)).sum(3).to(q.dtype) for x in (dqs, dks))
        dw = None if w is None or dws is None else dws.sum(0).to(w.dtype)
        if dinitial is not None and initial is not None:
            dinitial = dinitial.to(initial.dtype)
        return dq, dk, dv, dg, dw, dinitial, None, None, None
