"""RWKV-7 on the GPU: what is kept between the passes, and how each kernel is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments
from halftune_kernels.launch import SCAN_FP32, Config, Rows, ceil_div
from halftune_kernels.ops.rwkv7 import GeneralisedDelta, kernels
from halftune_kernels.scan.chunk_launch import BLOCK, CHUNK, ChunkLaunch, as_given, contiguous, keep, of_output

# (kernel, half): rows of (largest padded key size, GPUs, all if none are named, cut); the first that fits.
# Chosen by compiling for every GPU (docs/measurements/kernels.md).
CONFIGS: dict[tuple[str, bool], Rows] = {
    ("products", True): ((256, (100,), Config(0, 2, 1, 16)), (256, (), Config(0, 2, 1, 32))),
    ("products", False): ((256, (), Config(0, 4, 1, 32)),),
    ("solve", True): ((256, (), Config(32, 4, 1, 32)),),
    ("solve", False): ((256, (), Config(32, 4, 1, 32)),),
    ("scan_forward", True): (
        (16, (), Config(32, 4, 1)),
        (128, (), Config(32, 8, 1)),
        (256, (), Config(16, 8, 1)),
    ),
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
    return _GeneralisedDelta.apply(scale, segments, want_final, r, w, k, v, a, b, initial_state)


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
    launch: ChunkLaunch, r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, scale: float,
) -> _Prepared:  # fmt: skip
    """All chunks at once; done again for the backward pass, which costs less than the memory would."""
    low = r.new_empty(*r.shape[:3], CHUNK, dtype=torch.float32)
    t, ak, rk, rb = (r.new_empty(low.shape) for _ in range(4))
    rising, ae, solved, falling_k, falling_b = (torch.empty_like(r) for _ in range(5))
    whole = r.new_empty(len(launch.chunks), *r.shape[2:], dtype=torch.float32)
    given = (r, w, k, a, b, low, ak, rk, rb, rising, ae, falling_k, falling_b, whole, launch.chunks, scale)
    launch.by_chunk(kernels.products, *given, parts=CHUNK // BLOCK)
    u = torch.empty_like(v)
    launch.by_chunk(kernels.solve, low, ak, v, ae, t, solved, u, launch.chunks)
    return _Prepared(t, ak, rk, rb, rising, solved, u, falling_k, falling_b, whole)


class _GeneralisedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, segments: Segments, want_final: bool, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r, w, k, v, a, b, initial = contiguous(*inputs)
        launch, wanted = ChunkLaunch("rwkv7", CONFIGS, r, v, segments), any(ctx.needs_input_grad)
        made = _prepare(launch, r, w, k, v, a, b, scale)
        read = (made.r, made.rb, made.w, made.u, made.b, made.whole, v, made.rk, made.k)
        o, final, new, states = launch.scan_channels(read, v, initial, wanted, want_final)
        if wanted:
            keep(ctx, scale, segments, r, w, k, v, a, b, new, states, initial)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        r, w, k, v, a, b, new, states, initial = ctx.saved_tensors
        do, (dfinal,) = of_output(do, v), contiguous(dfinal)
        launch, scale = ChunkLaunch("rwkv7", CONFIGS, r, v, ctx.segments), ctx.scale
        made = _prepare(launch, r, w, k, v, a, b, scale)
        read = (made.r, made.rb, made.w, made.b, made.whole)
        dn, dstates, dinitial = launch.scan_channels_back(read, do, dfinal, initial)

        dx, dv = torch.empty_like(v), torch.empty_like(v)
        erk, erb, eak, eab = (torch.empty_like(made.rk) for _ in range(4))
        given = (v, made.t, made.ak, made.rk, made.k, do, new, dn, dstates, dx, dv, erk, erb, eak, eab)
        launch.by_chunk(kernels.square_gradients, *given, launch.chunks, scale)

        dr, dw, dk, da, db = (torch.empty_like(x) for x in (r, w, k, a, b))
        parts = ceil_div(r.shape[3], min(launch.cut(kernels.chunk_backward).depth, launch.sizes["BK"]))
        given = (r, w, k, v, a, b, do, new, dx, states, dstates, erk, erb, eak, eab, dr, dw, dk, da, db)
        launch.by_chunk(kernels.chunk_backward, *given, launch.chunks, scale, v.shape[3], parts=parts)
        return None, None, None, dr, dw, dk, dv, da, db, as_given(dinitial, initial)
