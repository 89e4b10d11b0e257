"""Simple decay on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div
from halftune_kernels.ops.ssd import kernels
from halftune_kernels.ops.ssd.decay import SimpleDecay
from halftune_kernels.scan.chunk_launch import CHUNK, ChunkLaunch, as_given, contiguous, gradient_of, keep, of_output

# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md): fits the shared memory, least spills.
# A chunk's 64 rows are 4 warps of 16: but for sm_100, 8 warps compute every product of chained ones twice.
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("prepare", True): ((256, (), Config(0, 4, 1, 32)),),
    ("prepare", False): ((256, (), Config(0, 4, 1, 32)),),
    ("scan_forward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): ((128, (), Config(32, 4, 1)), (256, (), Config(16, 8, 1))),
    ("scan_backward", False): SCAN_FP32,
    ("chunk_backward", True): ((256, (100,), Config(64, 8, 1, 32)), (256, (), Config(32, 4, 1, 32))),
    ("chunk_backward", False): ((256, (90, 100), Config(16, 8, 1, 16)), (256, (), Config(16, 4, 1, 16))),
}


def simple_decay(call: SimpleDecay) -> tuple[torch.Tensor, torch.Tensor]:
    """See `halftune_kernels.ops.ssd.simple_decay`."""
    q, k, v, g, w, scale, initial_state, segments, output_dtype = call
    return _SimpleDecay.apply(scale, segments, output_dtype, q, k, v, g, w, initial_state)


class _SimpleDecay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Segments, output_dtype: torch.dtype, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, w, initial = contiguous(*inputs)
        launch = ChunkLaunch("ssd", CONFIGS, q, v, segments)
        p = q.new_empty(*v.shape[:3], CHUNK)
        b, f = (q.new_empty(v.shape[:3], dtype=torch.float32) for _ in range(2))
        launch.by_chunk(kernels.prepare, q, k, g, p, b, f, launch.chunks, scale)

        wanted = any(ctx.needs_input_grad)
        states = launch.states_of_chunks() if wanted else None
        o, final = torch.empty_like(v, dtype=output_dtype), launch.states_of_samples()
        launch.scan(kernels.scan_forward, q, k, v, w, b, f, p, o, states, initial, final, launch.samples, scale)
        if wanted:
            keep(ctx, scale, segments, q, k, v, g, w, b, f, p, states, initial)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, w, b, f, p, states, initial = ctx.saved_tensors
        launch, scale, rows = ChunkLaunch("ssd", CONFIGS, q, v, ctx.segments), ctx.scale, q.shape[0] * q.shape[1]
        do, (dfinal,), dinitial = of_output(do, v), contiguous(dfinal), gradient_of(initial)
        dv, dstates, dws = torch.empty_like(v), torch.empty_like(states), None
        if w is not None:
            tiles = ceil_div(v.shape[3], launch.cut(kernels.scan_backward).width)
            dws = q.new_empty(tiles, *w.shape, dtype=torch.float32)
        given = (q, k, v, w, b, f, p, do, dv, dws, dstates, dfinal, dinitial, launch.samples, scale, rows)
        launch.scan(kernels.scan_backward, *given)

        # fp32: the sum over value heads may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], q.shape[3], dtype=torch.float32) for _ in range(2))
        dg = torch.empty_like(g)
        given = (q, k, v, w, b, f, do, states, dstates, dqs, dks, dg, launch.chunks, scale)
        launch.by_chunk(kernels.chunk_backward, *given)
        dq, dk = (x.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype) for x in (dqs, dks))
        dw = None if w is None or dws is None else dws.sum(0).to(w.dtype)
        return None, None, None, dq, dk, dv, dg, dw, as_given(dinitial, initial)
