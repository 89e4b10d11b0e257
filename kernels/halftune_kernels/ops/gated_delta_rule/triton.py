"""The gated delta rule on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments
from halftune_kernels.launch import SCAN_FP32, Config, Rows
from halftune_kernels.ops.gated_delta_rule import kernels
from halftune_kernels.scan.chunk_launch import CHUNK, ChunkLaunch, as_given, contiguous, gradient_of, keep, of_output
from halftune_kernels.scan.delta_arguments import DeltaRule

# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md): fits the shared memory, least spills; narrow tiles
# of values also give the scans more blocks to fill the GPU with.
# A chunk's 64 rows are 4 warps of 16: but for sm_100, 8 warps compute every product of chained ones twice.
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("solve", True): (
        (128, (), Config(0, 4, 1, 32)),
        (256, (80,), Config(0, 8, 1, 32)),
        (256, (), Config(0, 4, 1, 32)),
    ),
    ("solve", False): ((256, (), Config(0, 4, 1, 32)),),
    ("scan_forward", True): (
        (128, (120,), Config(32, 8, 1)),
        (128, (), Config(32, 4, 1)),
        (256, (), Config(16, 8, 1)),
    ),
    ("scan_forward", False): SCAN_FP32,
    ("scan_backward", True): (
        (16, (), Config(16, 4, 1)),
        (128, (), Config(32, 4, 1)),
        (256, (), Config(16, 8, 1)),
    ),
    ("scan_backward", False): SCAN_FP32,
    ("chunk_backward", True): ((256, (100,), Config(32, 8, 1, 32)), (256, (), Config(32, 4, 1, 32))),
    ("chunk_backward", False): ((256, (100,), Config(16, 8, 1, 16)), (256, (), Config(16, 4, 1, 16))),
}


def gated_delta_rule(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.gated_delta_rule.gated_delta_rule`."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    return _GatedDeltaRule.apply(scale, segments, normalise, want_final, q, k, v, g, beta, initial_state)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Segments, normalise: bool, want_final: bool, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v, g, beta, initial = contiguous(*inputs)
        launch = ChunkLaunch("gated_delta_rule", CONFIGS, q, v, segments)
        rq, rk = (q.new_empty(q.shape[:3], dtype=torch.float32) if normalise else None for _ in range(2))
        t, p = (q.new_empty(*v.shape[:3], CHUNK) for _ in range(2))
        b, f = (q.new_empty(v.shape[:3], dtype=torch.float32) for _ in range(2))
        launch.by_chunk(kernels.solve, q, k, g, beta, t, p, b, f, rq, rk, launch.chunks, scale)

        wanted = any(ctx.needs_input_grad)
        new, states = (torch.empty_like(v), launch.states_of_chunks()) if wanted else (None, None)
        o, final = torch.empty_like(v), launch.states_of_samples() if want_final else None
        given = (q, k, v, b, f, beta, t, p, rq, rk, o, new, states, initial, final, launch.samples, scale)
        launch.scan(kernels.scan_forward, *given)
        if wanted:
            keep(ctx, scale, segments, q, k, v, g, beta, t, p, b, f, rq, rk, new, states, initial)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, t, p, b, f, rq, rk, new, states, initial = ctx.saved_tensors
        launch, scale = ChunkLaunch("gated_delta_rule", CONFIGS, q, v, ctx.segments), ctx.scale
        do, (dfinal,), dinitial = of_output(do, v), contiguous(dfinal), gradient_of(initial)
        dv, dx, dstates = torch.empty_like(v), torch.empty_like(v), torch.empty_like(states)
        given = (q, k, b, f, beta, t, p, rq, rk, do, dv, dx, dstates, dfinal, dinitial, launch.samples, scale)
        launch.scan(kernels.scan_backward, *given)

        # fp32: the sum over value heads and the way back through the norm may cancel nearly all of a part
        dqs, dks = (q.new_empty(*v.shape[:3], q.shape[3], dtype=torch.float32) for _ in range(2))
        dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
        given = (q, k, v, b, f, beta, rq, rk, do, new, dx, states, dstates, dqs, dks, dg, dbeta, launch.chunks, scale)
        launch.by_chunk(kernels.chunk_backward, *given, q.shape[3], v.shape[3])
        dq, dk = launch.reduce_heads(q, k, dqs, dks, normalise=rq is not None)
        return None, None, None, None, dq, dk, dv, dg, dbeta, as_given(dinitial, initial)
