"""Value heads that share keys: beside each other in a row for products with the keys, apart for their own decays.

Shapes: U units, C rows, R value heads of one key head, V value channels.
"""

from __future__ import annotations

import torch

from halftune_kernels.arguments import Segments
from halftune_kernels.chunk_scan import ChunkOperator, Plan, Tensors, chunk_scan
from halftune_kernels.memory import Cut


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


def decayed(state: torch.Tensor, whole: torch.Tensor, out: torch.Tensor) -> None:
    """States [U, K, R * V] times the decay [U, 1, R, 1] of each value head, into ``out``."""
    split = (whole.shape[2], -1)
    torch.mul(state.unflatten(2, split), whole, out=out.unflatten(2, split))


def add_decayed(into: torch.Tensor, state: torch.Tensor, whole: torch.Tensor) -> None:
    """Adds to ``into`` what `decayed` makes."""
    split = (whole.shape[2], -1)
    into.unflatten(2, split).addcmul_(state.unflatten(2, split), whole)
