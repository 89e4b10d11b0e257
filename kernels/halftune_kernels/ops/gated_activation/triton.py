"""Gated activations in Triton: one launch forward, one backward. Formulas: see ``reference.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, ceil_div, channels_together, power_of_two, start
from halftune_kernels.ops.gated_activation.reference import Into

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_TILE = 1024  # columns of a program


@triton.jit
def act_and_slope(z, KIND: tl.constexpr):
    if KIND == 0:
        s = 1.0 / (1.0 + tl.exp(-z))
        slope = s * (1.0 + z * (1.0 - s))
    elif KIND == 1:  # ½ (1 + tanh u) = σ(2u)
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
        slope = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    else:
        s = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))
        slope = s + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    return z * s, slope


@triton.jit
def act_forward(gate, up, out, gate_stride, up_stride, C: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr):
    """One row's tile of S columns of C."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * S + tl.arange(0, S)
    inside = column < C
    z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    acted, _ = act_and_slope(z, KIND)  # type: ignore[misc]
    tl.store(out + row * C + column, (acted * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def act_backward(
    grad, gate, up, dgate, dup, acted_out, grad_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    C: tl.constexpr, S: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row's tile; results may go where the inputs are, since a program reads its tile before it writes."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * S + tl.arange(0, S)
    inside = column < C
    g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    acted, slope = act_and_slope(z, KIND)  # type: ignore[misc]
    tl.store(dgate + row * dgate_stride + column, (g * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_stride + column, (g * acted).to(dup.dtype.element_ty), mask=inside)
    if acted_out is not None:
        tl.store(acted_out + row * grad_stride + column, (acted * u).to(acted_out.dtype.element_ty), mask=inside)


def _cut(shape: torch.Size) -> tuple[tuple[int, int], int, Config]:
    """Grid, columns of a tile, configuration."""
    rows, width = shape
    tile = min(_TILE, power_of_two(width))
    return (rows, ceil_div(width, tile)), tile, Config(tile, 4, 1)


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """Writes ``act(gate) · up`` to ``out``, contiguous."""
    gate, up = channels_together(gate), channels_together(up)
    grid, tile, config = _cut(gate.shape)
    how = {"C": gate.shape[1], "S": tile, "KIND": KINDS[activation]}
    start(act_forward, grid, config, gate, up, out, gate.stride(0), up.stride(0), **how)


def backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, into: Into) -> None:
    """Writes the gradients of gate and up, and ``act(gate) · up`` over its gradient unless None."""
    if into[2] is None:
        grad, gate, up = channels_together(grad), channels_together(gate), channels_together(up)
    assert all(x.stride(1) == 1 for x in (grad, gate, up)), "in place: channels side by side"
    grid, tile, config = _cut(gate.shape)
    how = {"C": gate.shape[1], "S": tile, "KIND": KINDS[activation]}
    strides = [x.stride(0) for x in (grad, gate, up, into[0], into[1])]
    start(act_backward, grid, config, grad, gate, up, *into, *strides, **how)
