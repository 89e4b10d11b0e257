"""Kimi delta attention on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div
from halftune_kernels.ops.kda import kernels
from halftune_kernels.scan.chunk_launch import BLOCK, CHUNK, ChunkLaunch, as_given, contiguous, keep, of_output
from halftune_kernels.scan.delta_arguments import DeltaRule

# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md).
# A chunk's 64 rows are 4 warps of 16: but for sm_100, 8 warps compute every product of chained ones twice.
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("products", True): ((256, (), Config(0, 2, 1, 32)),),
    ("products", False): ((256, (90, 100), Config(0, 4, 1, 32)), (256, (), Config(0, 4, 1, 16))),
    ("solve", True): ((256, (), Config(64, 4, 1, 64)),),
    ("solve", False): ((256, (), Config(32, 4, 1, 32)),),
    ("scan_forward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("square_gradients", True): ((256, (100,), Config(32, 8, 1)), (256, (), Config(32, 4, 1))),
    ("square_gradients", False): ((256, (), Config(16, 8, 1)),),
    ("chunk_backward", True): (
        (128, (), Config(32, 8, 1, 32)),
        (256, (80, 86, 90), Config(32, 8, 1, 16)),
        (256, (), Config(32, 8, 1, 32)),
    ),
    ("chunk_backward", False): ((256, (), Config(32, 8, 1, 32)),),
}


def kda(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.kda.kda`."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    return _KimiDelta.apply(scale, segments, normalise, want_final, q, k, v, g, beta, initial_state)


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
    launch: ChunkLaunch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    scale: float, normalise: bool,
) -> _Prepared:  # fmt: skip
    """All chunks at once; done again for the backward pass, which costs less than the memory would."""
    rq, rk = launch.norms(q, k) if normalise else (None, None)
    a = q.new_empty(*v.shape[:3], CHUNK, dtype=torch.float32)
    t, p = (q.new_empty(a.shape) for _ in range(2))
    rising, keys, w, falling = (q.new_empty(*v.shape[:3], q.shape[3]) for _ in range(4))
    whole = q.new_empty(len(launch.chunks), v.shape[2], q.shape[3], dtype=torch.float32)
    given = (q, k, g, rq, rk, a, p, rising, keys, falling, whole, launch.chunks, scale)
    launch.by_chunk(kernels.products, *given, parts=CHUNK // BLOCK)
    u = torch.empty_like(v)
    launch.by_chunk(kernels.solve, a, beta, v, keys, t, w, u, launch.chunks)
    return _Prepared(rq, rk, t, p, rising, w, u, falling, whole)


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Segments, normalise: bool, want_final: bool, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, g, beta, initial = contiguous(*inputs)
        launch, wanted = ChunkLaunch("kda", CONFIGS, q, v, segments), any(ctx.needs_input_grad)
        made = _prepare(launch, q, k, v, g, beta, scale, normalise)
        read = (made.q, made.p, made.w, made.u, made.k, made.whole, None, None, None)
        o, final, new, states = launch.scan_channels(read, v, initial, wanted, want_final)
        if wanted:
            keep(ctx, scale, segments, q, k, v, g, beta, new, states, initial)
            ctx.normalise = normalise
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, new, states, initial = ctx.saved_tensors
        do, (dfinal,) = of_output(do, v), contiguous(dfinal)
        launch, scale, rows = ChunkLaunch("kda", CONFIGS, q, v, ctx.segments), ctx.scale, q.shape[0] * q.shape[1]
        made = _prepare(launch, q, k, v, g, beta, scale, ctx.normalise)
        read = (made.q, made.p, made.w, made.k, made.whole)
        dn, dstates, dinitial = launch.scan_channels_back(read, do, dfinal, initial)

        parts = ceil_div(q.shape[3], min(launch.cut(kernels.chunk_backward).depth, launch.sizes["BK"]))
        dx, dv, e, f = torch.empty_like(v), torch.empty_like(v), torch.empty_like(made.p), torch.empty_like(made.p)
        dbetas = beta.new_empty(1 + parts, *beta.shape, dtype=torch.float32)
        given = (v, beta, made.t, do, new, dn, dx, dv, e, f, dbetas, launch.chunks, scale)
        launch.by_chunk(kernels.square_gradients, *given)

        # fp32: the sum over value heads and the way back through the norm may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], q.shape[3], dtype=torch.float32) for _ in range(2))
        dg = torch.empty_like(g)
        given = (q, k, g, beta, made.rq, made.rk, do, new, dx, states, dstates, e, f, dqs, dks, dg, dbetas)
        launch.by_chunk(kernels.chunk_backward, *given, launch.chunks, scale, rows, parts=parts)
        dq, dk = launch.reduce_heads(q, k, dqs, dks, normalise=ctx.normalise)
        dbeta = dbetas.sum(0).to(beta.dtype)
        return None, None, None, None, dq, dk, dv, dg, dbeta, as_given(dinitial, initial)
