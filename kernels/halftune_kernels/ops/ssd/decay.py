"""Simple decay as it is called: arguments are checked here, computed is in the chosen implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halftune_kernels.arguments import (
    ArgumentError,
    Segments,
    Shapes,
    check_floating,
    check_heads,
    check_same_device,
    check_same_dtype,
    check_scale,
    check_state,
    find_segments,
    without_autocast,
)
from halftune_kernels.dispatch import module
from halftune_kernels.scan.delta_arguments import MOST_KEYS, check_head_size


class SimpleDecay(NamedTuple):
    """A checked call of `simple_decay`, as every implementation gets it; shapes as there."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    w: torch.Tensor | None
    scale: float
    initial_state: torch.Tensor | None
    segments: Segments
    output_dtype: torch.dtype


@without_autocast
def simple_decay(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    *,
    w: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    backend: str | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``S_t = exp(g_t) S_{t-1} + k_t^T (w_t v_t)``, ``o_t = scale q_t S_t``.

    Args:
        q: [B, T, G, K] queries; K is 1 to 256, V is not limited: Zamba2's default is 640.
        k: [B, T, G, K] keys.
        v: [B, T, H, V] values; H is a multiple of G, head h uses keys of group h // (H / G).
        g: [B, T, H] log decay, at most 0, fp32 for accuracy; or [H], the same at every token (RetNet, lightning).
        w: [B, T, H] weight of each value (Mamba-2's dt); 1 if None.
        scale: of the output; K ** -0.5 if None.
        initial_state: [N, H, K, V]; zero if None. N is the number of segments: B, or the samples of a packed row.
        output_final_state: return the state after each segment's last token, fp32.
        cu_seqlens: [N + 1] boundaries of the samples in a packed row (B = 1).
        seq_idx: [B, T] sample numbers, in place of ``cu_seqlens``.
        backend: see `halftune_kernels.dispatch.choose`.
        output_dtype: of o; that of ``v`` if None. fp32 where more is computed from o: one rounding less.

    Returns:
        o [B, T, H, V], and the final state [N, H, K, V] or None.

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    shapes = Shapes("simple_decay")
    for name, tensor, names in (("q", q, "B T G K"), ("k", k, "B T G K"), ("v", v, "B T H V"), ("w", w, "B T H")):
        shapes.check(name, tensor, names, optional=name == "w")
    _check_head_sizes("simple_decay", shapes)
    if not isinstance(g, torch.Tensor):
        raise ArgumentError("simple_decay", "g", came=f"a {type(g).__name__}", expected="a tensor, [B, T, H] or [H]")
    check_heads("simple_decay", "v", shapes["H"], of="k", groups=shapes["G"])
    if g.dim() == 1:
        shapes.check("g", g, "H")
        g = g.expand(*v.shape[:3])
    shapes.check("g", g, "B T H")
    dtype = check_same_dtype("simple_decay", q=q, k=k, v=v)
    check_floating("simple_decay", g=g, w=w, initial_state=initial_state)
    device = check_same_device("simple_decay", q=q, k=k, v=v, g=g, w=w, initial_state=initial_state)
    segments = find_segments("simple_decay", shapes["B"], shapes["T"], cu_seqlens, seq_idx)
    Shapes("simple_decay", N=segments.count, H=shapes["H"], K=shapes["K"], V=shapes["V"]).check(
        "initial_state", initial_state, "N H K V", optional=True
    )
    scale = check_scale("simple_decay", scale, keys=shapes["K"])
    run = module("ssd", device, dtype, backend).simple_decay
    o, state = run(SimpleDecay(q, k, v, g, w, scale, initial_state, segments, output_dtype or dtype))
    return o, state if output_final_state else None


@without_autocast
def simple_decay_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    *,
    w: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """One token of `simple_decay`, for generation; ``state`` is updated in place.

    Args:
        q: [B, G, K] queries.
        k: [B, G, K] keys.
        v: [B, H, V] values.
        g: [B, H] log decay.
        state: [B, H, K, V], fp32.
        w: [B, H] weight of the values; 1 if None.
        scale: of the output; K ** -0.5 if None.

    Returns:
        o [B, H, V] in the dtype of ``v``.

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    shapes = Shapes("simple_decay_step")
    for name, tensor, names in (
        ("q", q, "B G K"), ("k", k, "B G K"), ("v", v, "B H V"), ("g", g, "B H"), ("w", w, "B H"),
        ("state", state, "B H K V"),
    ):  # fmt: skip
        shapes.check(name, tensor, names, optional=name == "w")
    check_heads("simple_decay_step", "v", shapes["H"], of="k", groups=shapes["G"])
    _check_head_sizes("simple_decay_step", shapes)
    check_same_dtype("simple_decay_step", q=q, k=k, v=v)
    check_floating("simple_decay_step", g=g, w=w)
    check_state("simple_decay_step", state)
    check_same_device("simple_decay_step", q=q, k=k, v=v, g=g, w=w, state=state)
    repeat, wide = shapes["H"] // shapes["G"], state.dtype
    q_BHK, k_BHK = (x.to(wide).repeat_interleave(repeat, dim=1) for x in (q, k))
    v_BHV = v.to(wide) if w is None else v.to(wide) * w.to(wide)[..., None]
    state.mul_(g.to(wide).exp()[..., None, None]).add_(k_BHK[..., None] * v_BHV[..., None, :])
    o = (q_BHK[..., None, :] @ state).squeeze(-2) * check_scale("simple_decay_step", scale, keys=shapes["K"])
    return o.to(v.dtype)


def _check_head_sizes(operator: str, shapes: Shapes) -> None:
    check_head_size(operator, "k", shapes["K"], MOST_KEYS)
    check_head_size(operator, "v", shapes["V"], None)  # its kernels tile the values, all of them
