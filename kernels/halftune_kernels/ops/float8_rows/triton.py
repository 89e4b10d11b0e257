"""Rounding to float8 by rows in Triton: one program for each row, read twice, the second time from the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, power_of_two, start

_TILE = 4096  # columns at a time


@triton.jit
def quantise_row(x, columns, values, scales, width, stride, S: tl.constexpr):
    """The largest magnitude of a row, then its values."""
    row = tl.cast(tl.program_id(0), tl.int64)
    top = tl.zeros((S,), tl.float32)
    for first in range(0, width, S):
        column = first + tl.arange(0, S)
        v = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        if columns is not None:
            v *= tl.load(columns + column, mask=column < width, other=0.0)
        top = tl.maximum(top, tl.abs(v))
    most = tl.max(top, 0)
    # One exact division a row: one for each value took three quarters of the time on an H200. A row of subnormal
    # numbers, whose factor would be infinite, becomes zeros.
    some = most > 1e-30
    tl.store(scales + row, tl.where(some, tl.div_rn(most, 448.0), 1.0))
    factor = tl.where(some, tl.div_rn(448.0, most), 1.0)
    for first in range(0, width, S):
        column = first + tl.arange(0, S)
        v = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        if columns is not None:
            v *= tl.load(columns + column, mask=column < width, other=0.0)
        q = tl.minimum(tl.maximum(v * factor, -448.0), 448.0)
        q = tl.where(v == v, q, v)  # a NaN stays one
        tl.store(values + row * width + column, q.to(values.dtype.element_ty), mask=column < width)


def quantise(x: torch.Tensor, columns: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the float8 values and the scales."""
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    rows, width = x.shape
    tile = min(_TILE, power_of_two(width))
    factors = None if columns is None else columns.contiguous()
    start(quantise_row, (rows,), Config(tile, 4, 1), x, factors, values, scales, width, x.stride(0), S=tile)
