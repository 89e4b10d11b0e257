"""The gated feed-forward layer with low-rank updates, for GPUs: products stacked, the activation one launch each way.

Shapes: T rows, H hidden size, M inner size. Kept for the backward pass: ``x``, both inner products ``[T, M]``, over
which their gradients are written, and the ``[T, S]`` of the updates; the activation is computed again by the launch
that makes the gradients. Where all three layers have updates, the activation's launches compute those on its sides,
too, and the inner products are kept without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.adapted_activation import most_ranks
from halftune_kernels.ops.adapted_activation.operators import ACT as ADAPTED_ACT
from halftune_kernels.ops.adapted_activation.operators import SLOPES_IN_PLACE as ADAPTED_SLOPES_IN_PLACE
from halftune_kernels.ops.gated_activation.operators import ACT, SLOPES_IN_PLACE
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight
from halftune_kernels.ops.lora_linear.stacked import Stack, with_factors


def lora_mlp(
    x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight, activation: str
) -> torch.Tensor:
    """See `halftune_kernels.ops.lora_mlp.lora_mlp`; ``x`` is ``[T, H]``."""
    layers = (gate, up, down)
    if torch.compiler.is_compiling():
        return _forward(Stack(layers[:2], x.dtype), Stack(layers[2:], x.dtype), x, activation)[0]
    out = _StackedMlp.apply(x, layers, activation, *(factor for layer in layers for factor in (layer.a, layer.b)))
    assert isinstance(out, torch.Tensor)
    return out


def _inner(layers: Sequence[AdaptedWeight], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Factors of the updates on both sides of the activation, and the scales; None unless all three have small ones."""
    gate, up, down = layers
    factors = gate.b, up.b, down.a
    known = [factor for factor in factors if factor is not None]
    if len(known) < 3 or max(min(factor.shape) for factor in known) > most_ranks(dtype):
        return None
    return *factors, gate.scale, up.scale


def _forward(first: Stack, last: Stack, x: torch.Tensor, activation: str) -> Any:
    """The result, both inner products, ``x Aᵀ`` of gate and up, and that of down."""
    low, inner = first.low(x), _inner((*first.layers, *last.layers), x.dtype)
    if inner is None:
        gated, upped = first.forward(x, low)
        acted = ACT(gated, upped, activation, None)
        low_down = last.low(acted)
    else:
        gated, upped = first.products(x)
        acted, low_down = ADAPTED_ACT(gated, upped, low, *inner, activation, None)
    return last.forward(acted, low_down)[0], gated, upped, low, low_down


class _StackedMlp(torch.autograd.Function):
    """The factors are arguments of their own, so that autograd sees them; ``layers`` holds them too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: tuple[AdaptedWeight, ...], activation: str, *factors: Any) -> Any:
        first, last = Stack(layers[:2], x.dtype), Stack(layers[2:], x.dtype)
        out, *kept = _forward(first, last, x, activation)
        ctx.layers = [layer._replace(a=None, b=None) for layer in layers]
        ctx.activation, ctx.count = activation, len(first.cast)
        ctx.save_for_backward(x, *kept, *factors, *first.cast, *last.cast)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, gated, upped, low, low_down, *saved = ctx.saved_tensors
        layers, cast = with_factors(ctx.layers, saved[:6]), saved[6:]
        first, last = Stack(layers[:2], x.dtype, cast[: ctx.count]), Stack(layers[2:], x.dtype, cast[ctx.count :])
        inner, of_inner = _inner(layers, x.dtype), []
        if inner is None:
            acted, grad_low = last.grad_inputs([grad], low_down, True)
            assert acted is not None, "asked for"
            SLOPES_IN_PLACE(acted, gated, upped, ctx.activation, None)  # from here on each is what its name says
            of_down = last.grad_factors([grad], grad_low, acted, low_down)
        else:
            grad_low = last.grad_low([grad], low_down)
            acted, _ = last.grad_inputs([grad], None, True)  # without the update's part, which the launch adds
            *of_inner, of_a = ADAPTED_SLOPES_IN_PLACE(acted, grad_low, gated, upped, low, *inner, ctx.activation, None)
            of_down = [of_a.to(saved[4].dtype), last.grad_b([grad], low_down)[0]]
        grads = [gated, upped]
        grad_x, grad_low = first.grad_inputs(grads, low, ctx.needs_input_grad[0])
        return grad_x, None, None, *first.grad_factors(grads, grad_low, x, low, of_inner), *of_down
