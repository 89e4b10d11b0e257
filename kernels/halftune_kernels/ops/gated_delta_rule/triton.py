"""The gated delta rule on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels import delta_kernels
from halftune_kernels.arguments import chunk_table, segment_table
from halftune_kernels.cuts import configuration
from halftune_kernels.delta_arguments import DeltaRule
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div, dot_precision, power_of_two, start
from halftune_kernels.ops.gated_delta_rule import kernels

CHUNK = 64
# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md): fits the shared memory, least spills; narrow tiles
# of values also give the scans more blocks to fill the GPU with.
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("solve", True): ((256, (), Config(0, 4, 1, 32)),),
    ("solve", False): ((256, (), Config(0, 4, 1, 32)),),
    ("scan_forward", True): (
        (128, (120,), Config(32, 8, 1)),
        (128, (), Config(32, 4, 1)),
        (256, (), Config(16, 8, 1)),
    ),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("chunk_backward", True): (
        (256, (90,), Config(64, 8, 1, 32)),
        (256, (100,), Config(32, 8, 1, 32)),
        (256, (), Config(16, 8, 1, 32)),
    ),
    ("chunk_backward", False): ((256, (100,), Config(16, 8, 1, 16)), (256, (), Config(16, 4, 1, 16))),
}
_REDUCE = Config(width=0, warps=4, stages=1)


def gated_delta_rule(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.gated_delta_rule.gated_delta_rule`."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    return _GatedDeltaRule.apply(q, k, v, g, beta, initial_state, scale, segments, normalise, want_final)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, initial, scale, segments, normalise, want_final):
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        initial = None if initial is None else initial.contiguous()
        batch, length, heads, width = v.shape
        size = q.shape[3]
        how = {"H": q.shape[2], "HV": heads, "K": size, "C": CHUNK, "BK": power_of_two(size)}
        how["PRECISION"] = dot_precision(q.dtype)
        rq, rk = (q.new_empty(q.shape[:3], dtype=torch.float32) if normalise else None for _ in range(2))
        chunks, table = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)
        t, p = (q.new_empty(batch, length, heads, CHUNK) for _ in range(2))
        b, f = (q.new_empty(batch, length, heads, dtype=torch.float32) for _ in range(2))
        cut = configuration(CONFIGS, "gated_delta_rule", "solve", q, how["BK"])
        given, tile = (q, k, g, beta, t, p, b, f, rq, rk, chunks, scale), min(cut.depth, how["BK"])
        start(kernels.solve, (len(chunks), heads), cut, *given, TK=tile, **how)

        keep = any(ctx.needs_input_grad)
        states = new = None
        if keep:
            states = q.new_empty(len(chunks), heads, size, width, dtype=_state_dtype(q.dtype))
            new = torch.empty_like(v)
        final = q.new_empty(segments.count, heads, size, width, dtype=torch.float32) if want_final else None
        o = torch.empty_like(v)
        cut = configuration(CONFIGS, "gated_delta_rule", "scan_forward", q, how["BK"])
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        given = (q, k, v, b, f, beta, t, p, rq, rk, o, new, states, initial, final, table, scale)
        start(kernels.scan_forward, grid, cut, *given, V=width, BV=cut.width, **how)
        if keep:
            ctx.save_for_backward(q, k, v, g, beta, t, p, b, f, rq, rk, new, states, initial)
            ctx.scale, ctx.segments, ctx.how = scale, segments, how
            ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):
        q, k, v, g, beta, t, p, b, f, rq, rk, new, states, initial = ctx.saved_tensors
        how, scale, segments = dict(ctx.how), ctx.scale, ctx.segments
        heads, width = v.shape[2:]
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        chunks, table = chunk_table(segments, CHUNK, q.device), segment_table(segments, CHUNK, q.device)
        dv, dx, dstates = torch.empty_like(v), torch.empty_like(v), torch.empty_like(states)
        dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
        cut = configuration(CONFIGS, "gated_delta_rule", "scan_backward", q, how["BK"])
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        given = (q, k, b, f, beta, t, p, rq, rk, do, dv, dx, dstates, dfinal, dinitial, table, scale)
        start(kernels.scan_backward, grid, cut, *given, V=width, BV=cut.width, **how)

        # fp32: the sum over value heads and the way back through the norm may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], how["K"], dtype=torch.float32) for _ in range(2))
        dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
        cut = configuration(CONFIGS, "gated_delta_rule", "chunk_backward", q, how["BK"])
        tiles = {"TK": min(cut.depth, how["BK"]), "TV": min(cut.width, power_of_two(width))}
        padded = how.pop("BK")
        given = (q, k, v, b, f, beta, rq, rk, do, new, dx, states, dstates, dqs, dks, dg, dbeta, chunks, scale)
        start(kernels.chunk_backward, (len(chunks), heads), cut, *given, how["K"], width, V=width, **tiles, **how)

        dq, dk = torch.empty_like(q), torch.empty_like(k)
        rows, tall = q.shape[0] * q.shape[1], max(1, 2048 // padded)
        kept = {name: how[name] for name in ("H", "HV", "K")} | {"BK": padded, "NORM": rq is not None}
        grid = (ceil_div(rows, tall), how["H"], 2)
        start(delta_kernels.reduce_heads, grid, _REDUCE, q, k, dqs, dks, dq, dk, rows, M=tall, **kept)
        if dinitial is not None and initial is not None:
            dinitial = dinitial.to(initial.dtype)
        return dq, dk, dv, dg, dbeta, dinitial, None, None, None, None


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the states kept for the backward pass: fp16 would overflow where little decays."""
    return dtype if dtype == torch.bfloat16 else torch.float32
