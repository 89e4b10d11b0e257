"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch

from halftune_kernels.arguments import ArgumentError, check_choice
from halftune_kernels.ops.rope import operators
from halftune_kernels.ops.rope.reference import FORMS, reference

__all__ = ["rope"]


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    form: str = "halves",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys rotated by the angles of their positions, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        q: ``[B, Hq, T, D]``, of any strides.
        k: ``[B, Hk, T, D]``.
        cos, sin: ``[B, T, R]`` or ``[1, T, R]`` with R ≤ D even, of any float dtype, without a gradient: those of each
            token's position, so that rows may be packed. Channels from R on are copied.
        form: which channels form a pair: ``halves`` (i, i + R/2), ``pairs`` (2i, 2i + 1), or ``pairs of half tables``,
            the same with columns i of the tables for both.
        dtype: of the results; that of ``q`` by default.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        Both, transposed views of ``[B, T, H, D]``, which is how projections come.

    Raises:
        ArgumentError: shapes do not fit.
    """
    check_choice("rope", "form", form, FORMS)
    (batch, _, length, width), rotated = q.shape, cos.shape[-1]
    if cos.shape != sin.shape or cos.shape not in ((batch, length, rotated), (1, length, rotated)):
        came = f"of shape {list(cos.shape)}"
        raise ArgumentError("rope", "cos", came=came, expected=f"[{batch} or 1, {length}, R], as sin")
    if rotated % 2 or rotated > width:
        raise ArgumentError("rope", "R", came=rotated, expected=f"even, at most {width}")
    if backend == "reference":
        return reference(q, k, cos, sin, form)
    return operators.ROPE(q, k, cos, sin, form, False, dtype or q.dtype, backend)
