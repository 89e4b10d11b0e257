"""Value heads that share keys: beside each other in a row for products with the keys, apart for their own decays.

Shapes: U units, C rows, R value heads of one key head, V value channels.
"""

from __future__ import annotations

import torch


def by_value_head(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[U, C, R * V] as [U, R, C, V], with as many heads as ``like`` has; a view."""
    return rows.unflatten(2, (like.shape[1], -1)).transpose(1, 2)


def by_row(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[U, R, C, V] times [U, R, C, 1] as a new [U, C, R * V]."""
    units, each, size, width = heads.shape
    out = heads.new_empty(units, size, each, width)
    return torch.mul(heads.transpose(1, 2), factor.transpose(1, 2), out=out).flatten(2)
