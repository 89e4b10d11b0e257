"""Value heads that share keys: beside each other in a row for products with the keys, apart for their own decays.

Shapes: U units, C rows, R value heads of one key head, V value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from halftune_kernels.arguments import Segments
from halftune_kernels.constants import constant
from halftune_kernels.memory import Cut
from halftune_kernels.scan.chunk_scan import LEAST_DECAY, ChunkOperator, Plan, Tensors, chunk_scan


def by_value_head(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[U, C, R * V] as [U, R, C, V], with as many heads as ``like`` has; a view."""
    return rows.unflatten(2, (like.shape[1], -1)).transpose(1, 2)


def by_row(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[U, R, C, V] times [U, R, C, 1] as a new [U, C, R * V]."""
    units, each, size, width = heads.shape
    out = heads.new_empty(units, size, each, width)
    return torch.mul(heads.transpose(1, 2), factor.transpose(1, 2), out=out).flatten(2)


def scan_by_key_head(
    operator: ChunkOperator,
    inputs: Tensors,
    initial: torch.Tensor | None,
    segments: Segments,
    cut: Cut,
    dtype: torch.dtype,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_scan` of an operator of key heads, whose states are [.., K, R * V].

    Args:
        operator: its inputs are q, k [U, C, K], v [U, C, R, V] and others [U, C, R].
        inputs: the same in [B, T, heads, ..].
        initial: [N, H, K, V], or None for zeros.
        segments: the samples.
        cut: the blocking.
        dtype: of the output.
        want_final: whether the final states are returned.

    Returns:
        [B, T, H, V], and [N, H, K, V] or None.
    """
    q, k, v, *_ = inputs
    (groups, keys), (heads, width) = q.shape[2:], v.shape[2:]
    each = heads // groups
    by_group = [x.flatten(0, 1).unflatten(1, (groups, each)) for x in inputs[2:]]
    state = None
    if initial is not None:  # [N, H, K, V] -> [N, key heads, K, R * V]
        state = initial.unflatten(1, (groups, each)).transpose(2, 3).flatten(3)
    units, together = cut.of_groups(each)
    plan = Plan(segments, (each, width), dtype, (keys, each * width), want_final, cut.chunk, units, together)
    o, final = chunk_scan(operator, (q.flatten(0, 1), k.flatten(0, 1), *by_group), state, plan)
    if final is not None:
        final = final.unflatten(3, (each, width)).transpose(2, 3).flatten(1, 2)
    return o.view(v.shape), final


class HeadDecay(NamedTuple):
    """The decay of a chunk, b its cumulated logarithm.

    Attributes:
        between: [U, R, C, C] exp(b_i - b_j) for i ≥ j, else 0.
        rising, falling: [U, R, C, 1] exp(b) and exp(b_C - b).
        whole: [U, 1, R, 1] exp(b_C).
    """

    between: torch.Tensor
    rising: torch.Tensor
    falling: torch.Tensor
    whole: torch.Tensor


def head_decay(g: torch.Tensor) -> HeadDecay:
    """Of the log decay [U, C, R]."""
    # fp64 costs nothing here, and keeps the digits of a slow decay that follows a fast one
    b = g.transpose(1, 2).double().clamp(min=LEAST_DECAY).cumsum(-1)
    last = b[..., -1:]
    between = (b[..., :, None] - b[..., None, :]).to(g.dtype)
    between.add_(_minus_infinity_above(b.shape[2], g.dtype, g.device)).exp_()
    rising, falling = b.exp().to(g.dtype)[..., None], (last - b).exp().to(g.dtype)[..., None]
    return HeadDecay(between, rising, falling, last.exp().to(g.dtype)[:, None])


@constant(64)
def _minus_infinity_above(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size, size), float("-inf"), dtype=dtype, device=device).triu_(1)


def leaving_decay_backward(
    d_b: torch.Tensor, written: torch.Tensor, states: torch.Tensor, left: torch.Tensor, whole: torch.Tensor
) -> None:
    """Adds to the gradient of b [U, R, C], fp64, what the states that leave have of it.

    Args:
        d_b: of all units.
        written: [M, C, R * V] what a row writes times the gradient of it, of the units that a state leaves.
        states: [U - F, K, R * V] those that enter, of all but the first units.
        left: [M, K, R * V] gradients of those that leave.
        whole: as in `HeadDecay`.
    """
    led, first, each = len(left), len(d_b) - len(states), d_b.shape[1]
    shares = written.unflatten(2, (each, -1)).sum(-1).transpose(1, 2).double()
    d_b[:led] -= shares
    d_b[:led, :, -1] += shares.sum(-1)
    if led > first:
        passing = (states[: led - first] * left[first:]).unflatten(2, (each, -1)).sum((1, 3))
        d_b[first:led, :, -1] += passing * whole[first:led, 0, :, 0]


def decayed(state: torch.Tensor, whole: torch.Tensor, out: torch.Tensor) -> None:
    """States [U, K, R * V] times the decay [U, 1, R, 1] of each value head, into ``out``."""
    split = (whole.shape[2], -1)
    torch.mul(state.unflatten(2, split), whole, out=out.unflatten(2, split))


def add_decayed(into: torch.Tensor, state: torch.Tensor, whole: torch.Tensor) -> None:
    """Adds to ``into`` what `decayed` makes."""
    split = (whole.shape[2], -1)
    into.unflatten(2, split).addcmul_(state.unflatten(2, split), whole)
