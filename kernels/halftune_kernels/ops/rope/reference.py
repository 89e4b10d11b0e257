"""Rotary position embedding in plain torch: differentiable, in the dtype of its inputs."""

from __future__ import annotations

import torch

FORMS = ("halves", "pairs", "pairs of half tables")


def places(form: str, width: int) -> tuple[slice, slice, slice, slice]:
    """Of R rotated channels: the first and the second of each pair, and the columns of the tables for them."""
    half = width // 2
    if form == "halves":
        first, second = slice(0, half), slice(half, width)
        return first, second, first, second
    first, second = slice(0, width, 2), slice(1, width, 2)
    table = slice(0, half)
    return (first, second, first, second) if form == "pairs" else (first, second, table, table)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: str, inverse: bool, dtype: torch.dtype
) -> torch.Tensor:
    """``x`` ``[B, H, T, D]`` rotated by tables ``[B, T, R]``, computed in fp32 (fp64 for fp64); ``[B, H, T, D]``."""
    wide, width = torch.promote_types(x.dtype, torch.float32), cos.shape[-1]
    first, second, c, s = places(form, width)
    cos, sin = (table.to(wide).unsqueeze(1) for table in (cos, sin))
    a, b = x[..., :width][..., first].to(wide), x[..., :width][..., second].to(wide)
    out = x.to(dtype, copy=True)
    rotated = out[..., :width]
    if inverse:  # the transposed map, which is the inverse rotation where both columns of a pair are equal
        rotated[..., first] = (a * cos[..., c] + b * sin[..., s]).to(dtype)
        rotated[..., second] = (b * cos[..., s] - a * sin[..., c]).to(dtype)
    else:
        rotated[..., first] = (a * cos[..., c] - b * sin[..., c]).to(dtype)
        rotated[..., second] = (b * cos[..., s] + a * sin[..., s]).to(dtype)
    return out


def reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: str = "halves"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated (arXiv:2104.09864)."""
    return tuple(rotate(x, cos, sin, form, False, x.dtype) for x in (q, k))  # type: ignore[return-value]
