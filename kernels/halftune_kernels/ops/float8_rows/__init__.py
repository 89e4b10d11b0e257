"""Rows in float8 (e4m3), each with a scale of its own: ``x ≈ values · scale``."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["quantise_rows", "rounded_rows"]


def quantise_rows(
    x: torch.Tensor, columns: torch.Tensor | None = None, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x · columns`` in float8_e4m3fn ``[T, C]``, and the scales ``[T, 1]`` fp32: the row's largest magnitude / 448.

    Args:
        x: ``[T, C]``, a floating dtype, without a gradient.
        columns: ``[C]`` fp32, factors of the columns, or None.
        backend: see `halftune_kernels.dispatch.choose`.
    """
    from halftune_kernels.ops.float8_rows.operators import QUANTISE  # most runs have no float8 weights

    return QUANTISE(x, columns, backend)


def rounded_rows(x: torch.Tensor, columns: torch.Tensor | None = None, *, backend: str | None = None) -> torch.Tensor:
    """What `quantise_rows` keeps of ``x · columns``, in the dtype of ``x``; the gradient is that without rounding."""
    out = _Rounded.apply(x, columns, backend)
    assert isinstance(out, torch.Tensor)
    return out


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, columns: torch.Tensor | None, backend: str | None) -> torch.Tensor:
        ctx.columns = columns
        if backend == "reference":
            from halftune_kernels.ops.float8_rows.reference import reference

            return reference(x, columns)
        values, scales = quantise_rows(x, columns, backend=backend)
        return (values.to(torch.promote_types(x.dtype, torch.float32)) * scales).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad if ctx.columns is None else (grad * ctx.columns).to(grad.dtype), None, None
