"""The formula of rounding to float8 by rows, in plain torch and fp64."""

from __future__ import annotations

import torch

LARGEST = 448.0  # of float8_e4m3fn, with three mantissa bits and exponents from -6
_SMALLEST_EXPONENT, _BITS = -6, 3


def reference(x: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
    """``x · columns`` rounded to multiples of the row's scale that float8_e4m3fn holds."""
    v = x.double() if columns is None else x.double() * columns.double()
    top = v.abs().amax(1, keepdim=True)
    scale = torch.where(top > 0, top / LARGEST, 1.0).float().double()  # kept in fp32
    q = v / scale
    exponent = torch.floor(torch.log2(q.abs().clamp(min=1e-30))).clamp(min=_SMALLEST_EXPONENT)
    step = torch.exp2(exponent - _BITS)
    return ((q / step).round() * step * scale).to(x.dtype)
