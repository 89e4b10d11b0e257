"""RWKV-7's generalised delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halftune_kernels.arguments import (
    Segments,
    Shapes,
    check_floating,
    check_same_device,
    check_same_dtype,
    check_scale,
    check_state,
    without_autocast,
)
from halftune_kernels.dispatch import module
from halftune_kernels.scan.delta_arguments import check_delta_arguments

__all__ = ["rwkv7", "rwkv7_step"]


class GeneralisedDelta(NamedTuple):
    """A checked call of `rwkv7`, as every implementation gets it; shapes as there.

    Attributes:
        segments: the samples of the row.
        want_final: whether the final state is returned.
    """

    r: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    initial_state: torch.Tensor | None
    segments: Segments
    want_final: bool


@without_autocast
def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``S_t = diag(exp(w_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t``, ``o_t = scale r_t S_t``.

    RWKV-7 calls it with a = -κ̂ and b = κ̂ ∘ η, κ̂ of norm 1, η in 0 … 1; larger products let the state grow.

    Args:
        r: [B, T, H, K] receptance (queries); K and V are 1 to 256.
        w: [B, T, H, K] log decay per channel, at most 0.
        k: [B, T, H, K] keys.
        v: [B, T, H, V] values.
        a: [B, T, H, K] what of the state is read to be replaced.
        b: [B, T, H, K] where it is written.
        scale: of the output.
        initial_state: [N, H, K, V]; zero if None. N is the number of samples: B, or those of a packed row.
        output_final_state: return the state after each sample's last token, fp32.
        cu_seqlens: [N + 1] boundaries of the samples in a packed row (B = 1).
        seq_idx: [B, T] sample numbers, in place of ``cu_seqlens``.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        o [B, T, H, V] in the dtype of ``v``, and the final state [N, H, K, V] or None.

    Raises:
        ArgumentError: an argument does not fit the others; it is named.
    """
    more = {"w": (w, "B T H K"), "a": (a, "B T H K"), "b": (b, "B T H K")}
    segments = check_delta_arguments(
        "rwkv7", r, k, v, more, initial_state, cu_seqlens, seq_idx, query="r", grouped=False
    )
    scale = check_scale("rwkv7", scale)
    run = module("rwkv7", r.device, r.dtype, backend).rwkv7
    return run(GeneralisedDelta(r, w, k, v, a, b, scale, initial_state, segments, output_final_state))


@without_autocast
def rwkv7_step(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """One token of `rwkv7`, for generation; ``state`` is updated in place.

    Args:
        r: [B, H, K].
        w: [B, H, K] log decay per channel.
        k: [B, H, K].
        v: [B, H, V].
        a: [B, H, K].
        b: [B, H, K].
        state: [B, H, K, V], fp32 or fp64.
        scale: of the output.

    Returns:
        o [B, H, V] in the dtype of ``v``.

    Raises:
        ArgumentError: an argument does not fit the others; it is named.
    """
    shapes = Shapes("rwkv7_step")
    for name, tensor in (("r", r), ("w", w), ("k", k), ("a", a), ("b", b)):
        shapes.check(name, tensor, "B H K")
    shapes.check("v", v, "B H V")
    shapes.check("state", state, "B H K V")
    check_same_dtype("rwkv7_step", r=r, k=k, v=v)
    check_floating("rwkv7_step", w=w, a=a, b=b)
    check_same_device("rwkv7_step", r=r, w=w, k=k, v=v, a=a, b=b, state=state)
    scale = check_scale("rwkv7_step", scale)
    check_state("rwkv7_step", state)
    r, w, k, a, b, wide_v = (x.to(state.dtype)[..., None, :] for x in (r, w, k, a, b, v))
    read = a @ state
    state.mul_(w.exp().transpose(2, 3)).addcmul_(b.transpose(2, 3), read).addcmul_(k.transpose(2, 3), wide_v)
    return (scale * (r @ state).squeeze(-2)).to(v.dtype)
