"""RWKV-7 on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels import delta_kernels
from halftune_kernels.arguments import Segments, chunk_table, segment_table
from halftune_kernels.cuts import configuration
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div, dot_precision, power_of_two, start
from halftune_kernels.ops.rwkv7 import GeneralisedDelta, kernels

CHUNK = 64
BLOCK = 16  # rows between which decays have factors
# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md).
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("products", True): ((256, (), Config(0, 4, 1, 32)),),
    ("products", False): ((256, (), Config(0, 4, 1, 32)),),
    ("solve", True): ((256, (), Config(32, 4, 1, 32)),),
    ("solve", False): ((256, (), Config(32, 4, 1, 32)),),
    ("scan_forward", True): ((128, (), Config(32, 8, 1)), (256, (), Config(16, 8, 1))),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("square_gradients", True): ((256, (120,), Config(16, 8, 1, 16)), (256, (), Config(16, 8, 1, 32))),
    # on sm_100 with 4 or 8 warps its products ask for more tensor memory than there is
    ("square_gradients", False): ((256, (100,), Config(16, 2, 1, 16)), (256, (), Config(16, 4, 1, 16))),
    ("chunk_backward", True): ((256, (), Config(32, 8, 1, 32)),),
    ("chunk_backward", False): ((256, (), Config(32, 8, 1, 32)),),
}


def rwkv7(call: GeneralisedDelta) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.rwkv7.rwkv7`."""
    r, w, k, v, a, b, scale, initial_state, segments, want_final = call
    a, b = a.to(r.dtype), b.to(r.dtype)  # products have operands of one dtype
    return _GeneralisedDelta.apply(r, w, k, v, a, b, initial_state, scale, segments, want_final)


class _Prepared(NamedTuple):
    """What the scans read and what does not depend on the state; see ``kernels.py``.

    Attributes:
        t: [B, T, H, C].
        ak: [B, T, H, C] A'(a, k).
        rk: [B, T, H, C] scale A(r, k).
        rb: [B, T, H, C] scale A(r, b).
        r: [B, T, H, K] scaled r, decayed from the entering state.
        w: [B, T, H, K].
        u: [B, T, H, V].
        k: [B, T, H, K] decayed to the leaving state.
        b: [B, T, H, K] decayed to the leaving state.
        whole: [chunks, H, K] fp32, decay of all rows.
    """

    t: torch.Tensor
    ak: torch.Tensor
    rk: torch.Tensor
    rb: torch.Tensor
    r: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor
    b: torch.Tensor
    whole: torch.Tensor


def _prepare(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    scale: float, segments: Segments,
) -> _Prepared:  # fmt: skip
    """All chunks at once; done again for the backward pass, which costs less than the memory would."""
    heads, size, width = *r.shape[2:], v.shape[3]
    padded, chunks = power_of_two(size), chunk_table(segments, CHUNK, r.device)
    how = {"H": heads, "K": size, "C": CHUNK, "BK": padded, "PRECISION": dot_precision(r.dtype)}
    low = r.new_empty(*r.shape[:3], CHUNK, dtype=torch.float32)
    t, ak, rk, rb = (r.new_empty(low.shape) for _ in range(4))
    rising, ae, solved, falling_k, falling_b = (torch.empty_like(r) for _ in range(5))
    whole, u = r.new_empty(len(chunks), heads, size, dtype=torch.float32), torch.empty_like(v)
    cut = configuration(CONFIGS, "rwkv7", "products", r, padded)
    given = (r, w, k, a, b, low, ak, rk, rb, rising, ae, falling_k, falling_b, whole, chunks, scale)
    grid = (len(chunks), heads, CHUNK // BLOCK)
    start(kernels.products, grid, cut, *given, R=BLOCK, TK=min(cut.depth, padded), **how)
    cut = configuration(CONFIGS, "rwkv7", "solve", r, padded)
    tiles = {"V": width, "BV": power_of_two(width), "TK": min(cut.depth, padded)}
    tiles["TV"] = min(cut.width, tiles["BV"])
    start(kernels.solve, (len(chunks), heads), cut, low, ak, v, ae, t, solved, u, chunks, **tiles, **how)
    return _Prepared(t, ak, rk, rb, rising, solved, u, falling_k, falling_b, whole)


class _GeneralisedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r, w, k, v, a, b, initial, scale, segments, want_final):
        r, w, k, v, a, b = (x.contiguous() for x in (r, w, k, v, a, b))
        initial = None if initial is None else initial.contiguous()
        heads, size, width = *r.shape[2:], v.shape[3]
        padded = power_of_two(size)
        made, table = _prepare(r, w, k, v, a, b, scale, segments), segment_table(segments, CHUNK, r.device)
        states = new = None
        if any(ctx.needs_input_grad):
            kept = r.dtype if r.dtype == torch.bfloat16 else torch.float32  # fp16 would overflow where little decays
            states, new = r.new_empty(len(made.whole), heads, size, width, dtype=kept), torch.empty_like(v)
            ctx.save_for_backward(r, w, k, v, a, b, new, states, initial)
            ctx.scale, ctx.segments = scale, segments
            ctx.set_materialize_grads(False)
        final = r.new_empty(segments.count, heads, size, width, dtype=torch.float32) if want_final else None
        o = torch.empty_like(v)
        cut = configuration(CONFIGS, "rwkv7", "scan_forward", r, padded)
        how = {"HV": heads, "K": size, "V": width, "C": CHUNK, "BK": padded, "BV": cut.width}
        how["PRECISION"] = dot_precision(r.dtype)
        given = (made.r, made.rb, made.w, made.u, made.b, made.whole, v, made.rk, made.k)
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        start(delta_kernels.scan_forward, grid, cut, *given, o, new, states, initial, final, table, **how)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):
        r, w, k, v, a, b, new, states, initial = ctx.saved_tensors
        scale, segments = ctx.scale, ctx.segments
        heads, size, width = *r.shape[2:], v.shape[3]
        padded = power_of_two(size)
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        made = _prepare(r, w, k, v, a, b, scale, segments)
        chunks, table = chunk_table(segments, CHUNK, r.device), segment_table(segments, CHUNK, r.device)
        how = {"K": size, "V": width, "C": CHUNK, "PRECISION": dot_precision(r.dtype)}

        dn, dstates = torch.empty_like(v), torch.empty_like(states)
        dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
        cut = configuration(CONFIGS, "rwkv7", "scan_backward", r, padded)
        given = (made.r, made.rb, made.w, made.b, made.whole, do, dn, dstates, dfinal, dinitial, table)
        grid = (ceil_div(width, cut.width) * heads * segments.count,)
        start(delta_kernels.scan_backward, grid, cut, *given, HV=heads, BK=padded, BV=cut.width, **how)

        dx, dv = torch.empty_like(v), torch.empty_like(v)
        erk, erb, eak, eab = (torch.empty_like(made.rk) for _ in range(4))
        cut = configuration(CONFIGS, "rwkv7", "square_gradients", r, padded)
        tiles = {"BV": power_of_two(width), "TK": min(cut.depth, padded)}
        tiles["TV"] = min(cut.width, tiles["BV"])
        given = (v, made.t, made.ak, made.rk, made.k, do, new, dn, dstates, dx, dv, erk, erb, eak, eab, chunks, scale)
        start(kernels.square_gradients, (len(chunks), heads), cut, *given, H=heads, BK=padded, **tiles, **how)

        dr, dw, dk, da, db = (torch.empty_like(x) for x in (r, w, k, a, b))
        cut = configuration(CONFIGS, "rwkv7", "chunk_backward", r, padded)
        tiles = {"TK": min(cut.depth, padded), "TV": min(cut.width, power_of_two(width))}
        given = (r, w, k, v, a, b, do, new, dx, states, dstates, erk, erb, eak, eab, dr, dw, dk, da, db, chunks, scale)
        grid = (len(chunks), heads, ceil_div(size, tiles["TK"]))
        start(kernels.chunk_backward, grid, cut, *given, width, H=heads, R=BLOCK, **tiles, **how)
        if dinitial is not None and initial is not None:
            dinitial = dinitial.to(initial.dtype)
        return dr, dw, dk, dv, da, db, dinitial, None, None, None
