"""Short causal convolution in shifts of whole rows, blocked for the cache, with a hand-written backward.

The segments are laid out one after the other with W - 1 rows in front of each, its initial state or zeros. On that
layout the convolution knows no boundaries: nothing can leak, and the rows in front collect the gradient of the
initial state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.arguments import Segments
from halftune_kernels.constants import constant
from halftune_kernels.ops.causal_conv1d import Convolution

_BLOCK = 1 << 16  # elements that one pass of shifts works on: they stay in the cache


def causal_conv1d(call: Convolution) -> torch.Tensor:
    """See `halftune_kernels.ops.causal_conv1d.causal_conv1d_fn`; x is [B, T, D] here."""
    return _CausalConv.apply(*call)  # type: ignore[return-value]


@constant(32)
def _places(segments: Segments, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row of x stands in the layout, [B*T], and each row in front of a segment, [N, W-1]."""
    lengths = torch.tensor(segments.lengths)
    number = torch.repeat_interleave(torch.arange(segments.count), lengths.long())
    rows = torch.arange(segments.rows) + (number + 1) * (width - 1)
    first = torch.tensor(segments.bounds[:-1]) + torch.arange(segments.count) * (width - 1)
    return rows.to(device), (first[:, None] + torch.arange(width - 1)).to(device)


def _layout(x: torch.Tensor, initial_states: torch.Tensor | None, width: int, segments: Segments) -> torch.Tensor:
    """[B*T + N*(W-1), D] in the compute dtype."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, front = _places(segments, width, x.device)
    laid = x.new_empty(len(rows) + front.numel(), x.shape[2], dtype=wide)
    for start, end, place in _runs(segments, width):
        laid[place : place + end - start] = x.flatten(0, 1)[start:end]
        laid[place - (width - 1) : place] = 0
    if initial_states is not None:
        laid[front.flatten()] = initial_states.to(wide).transpose(1, 2).flatten(0, 1)
    return laid


def _runs(segments: Segments, width: int) -> list[tuple[int, int, int]]:
    """(first row, end row, place in the layout) of each segment."""
    bounds = segments.bounds
    return [(bounds[n], bounds[n + 1], bounds[n] + (n + 1) * (width - 1)) for n in range(segments.count)]


def _blocks(count: int, channels: int) -> range:
    return range(0, count, max(1, _BLOCK // max(channels, 1)))


def _window(laid: torch.Tensor, taps: list[torch.Tensor], bias: torch.Tensor | None, start: int, end: int):
    """Convolution ending at layout rows start + W - 1 to end + W - 1."""
    out = laid[start:end] * taps[0] if bias is None else torch.addcmul(bias, laid[start:end], taps[0])
    for shift, tap in enumerate(taps[1:], 1):
        out.addcmul_(laid[start + shift : end + shift], tap)
    return out


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        x, weight, bias, silu, initial_states, segments = Convolution(*call)
        width = weight.shape[1]
        laid = _layout(x, initial_states, width, segments)
        taps, wide_bias = _taps(weight, bias, laid.dtype)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat = y.view(-1, x.shape[2])
        for first, last, place in _runs(segments, width):
            for start in _blocks(last - first, x.shape[2]):
                end = min(start + _blocks(1 << 62, x.shape[2]).step, last - first)
                at = place - (width - 1)
                out = _window(laid, taps, wide_bias, at + start, at + end)
                flat[first + start : first + end] = torch.nn.functional.silu(out, inplace=True) if silu else out
        ctx.save_for_backward(x, weight, bias, initial_states)
        ctx.silu, ctx.segments = silu, segments
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, initial_states = ctx.saved_tensors
        segments, silu, width = ctx.segments, ctx.silu, weight.shape[1]
        laid = _layout(x, initial_states, width, segments)
        taps, wide_bias = _taps(weight, bias, laid.dtype)
        dlaid = torch.zeros_like(laid)
        dtaps = [torch.zeros_like(tap) for tap in taps]
        dbias = torch.zeros_like(taps[0])
        dy_RD = dy.reshape(-1, x.shape[2])
        for first, last, place in _runs(segments, width):
            for start in _blocks(last - first, x.shape[2]):
                end = min(start + _blocks(1 << 62, x.shape[2]).step, last - first)
                at = place - (width - 1)
                dz = dy_RD[first + start : first + end].to(laid.dtype)
                if silu:
                    z = _window(laid, taps, wide_bias, at + start, at + end)
                    dz = torch.ops.aten.silu_backward(dz, z)
                dbias += dz.sum(0)
                for shift, tap in enumerate(taps):
                    rows = slice(at + start + shift, at + end + shift)
                    dtaps[shift] += (dz * laid[rows]).sum(0)
                    dlaid[rows].addcmul_(dz, tap)
        rows, front = _places(segments, width, x.device)
        dinitial = None
        if initial_states is not None:
            dinitial = dlaid[front].transpose(1, 2).to(initial_states.dtype)
        dx = dlaid[rows].view(x.shape).to(x.dtype)
        dweight = torch.stack(dtaps, 1).to(weight.dtype)
        return dx, dweight, None if bias is None else dbias.to(bias.dtype), None, dinitial, None


def _taps(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype):
    """The W rows [D] that meet x[t - W + 1] ... x[t], and the bias, in the compute dtype."""
    return list(weight.to(dtype).T.contiguous()), None if bias is None else bias.to(dtype)
