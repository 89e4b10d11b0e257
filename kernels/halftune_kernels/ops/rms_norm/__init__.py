"""Root-mean-square normalisation over the last dimension, with weights ``w`` or ``1 + w``.

On GPUs and in graphs a registered operator, imported on the first call; elsewhere an autograd function.
"""

from __future__ import annotations

import torch

from halftune_kernels.library import opaque
from halftune_kernels.ops.rms_norm import cpu
from halftune_kernels.ops.rms_norm.cpu import Norm

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
    rounds: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``x / √(mean(x²) + eps) · (weight + offset)`` over the last dimension, computed in fp32 (fp64 for fp64).

    Args:
        x: ``[..., H]``, a floating dtype.
        weight: ``[H]``.
        eps: added to the mean square.
        offset: 1 for models whose weights are around zero.
        dtype: of the result; that of ``x`` by default.
        rounds: whether the normalised value is rounded to the dtype of ``x`` before the weight, as Llama's layers do.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        ``[..., H]``, contiguous.
    """
    if backend == "reference":
        from halftune_kernels.ops.rms_norm.reference import reference

        return reference(x, weight, eps, offset)
    rows, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    if backend is not None or opaque(x):
        from halftune_kernels.ops.rms_norm import operators

        out = operators.NORM(rows, weight, eps, offset, rounds, dtype, backend)[0]
    else:
        out = cpu.rms_norm(rows, Norm(weight, eps, offset, rounds, dtype))
    return out.view(x.shape)
