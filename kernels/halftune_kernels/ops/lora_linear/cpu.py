"""Linear layers with low-rank updates on one input as a single autograd function, in chunks that stay in the cache.

Shapes: T rows, I inputs, O outputs, R rank. Runs on every device; the chunks are for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.lora_linear.projection import Projection, rows_per_chunk
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight


def lora_linear(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> tuple[torch.Tensor, ...]:
    """``x W_iᵀ + bias_i + s_i (x A_iᵀ) B_iᵀ`` for every layer.

    Products are computed in the dtype of ``x``, weights are cast to it; the updates are added in the products' own
    accumulators. Gradients reach ``x``, the ``a`` and the ``b``; weights and biases are taken for frozen. The gradient
    of ``x`` is summed over the layers in place.

    Args:
        x: ``[..., I]``, a floating dtype.
        layers: all with I inputs.

    Returns:
        One ``[..., O_i]`` for each layer, contiguous, in the dtype of ``x``.
    """
    flat = x.reshape(-1, x.shape[-1])
    factors = [tensor for layer in layers for tensor in (layer.a, layer.b)]
    outputs = _LoraLinear.apply(flat, tuple(layers), *factors)
    assert isinstance(outputs, tuple)
    return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)


class _LoraLinear(torch.autograd.Function):
    """The factors are arguments of their own, so that autograd sees them; ``layers`` holds them too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: tuple[AdaptedWeight, ...], *factors: Any) -> Any:
        projections = [Projection(layer, x.dtype) for layer in layers]
        rows = x.shape[0]
        outputs = tuple(x.new_empty(rows, p.weight.shape[0]) for p in projections)
        lows = [p.empty_low(rows) for p in projections]
        step = rows_per_chunk(rows, x)
        for start in range(0, rows, step):
            cut = slice(start, start + step)
            for projection, output, low in zip(projections, outputs, lows, strict=True):
                projection.forward(x[cut], output[cut], None if low is None else low[cut])
        ctx.layers, ctx.step = [layer._replace(a=None, b=None) for layer in layers], step
        ctx.save_for_backward(x, *lows, *factors)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        count = len(ctx.layers)
        x, *saved = ctx.saved_tensors
        lows, factors = saved[:count], saved[count:]
        layers = [layer._replace(a=factors[2 * i], b=factors[2 * i + 1]) for i, layer in enumerate(ctx.layers)]
        projections = [Projection(layer, x.dtype) for layer in layers]
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for start in range(0, x.shape[0], ctx.step):
            cut = slice(start, start + ctx.step)
            for index, projection in enumerate(projections):
                low = None if lows[index] is None else lows[index][cut]
                into = None if grad_x is None else grad_x[cut]
                projection.backward(grads[index][cut], x[cut], low, into, accumulate=index > 0)
        return grad_x, None, *(gradient for p in projections for gradient in p.gradients())
