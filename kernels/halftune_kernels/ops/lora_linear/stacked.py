"""Linear layers with low-rank updates on one input, for GPUs: one product for all A, updates added by the product of B.

Shapes: T rows, I inputs, O outputs, S the sum of the ranks. Beside x and the factors ``x Aᵀ`` ``[T, S]`` is kept, and
the factors in the dtype that is computed in. Every launch is one of torch's own, so that graphs, tensors without values
and activation checkpointing need no registration; in a graph autograd derives the backward pass from the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halftune_kernels.ops.float8_linear import Float8Weight, Rows, float8_linear, product, product_of_gradient
from halftune_kernels.ops.float8_rows import quantise_rows
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight, dense


class Stack:
    """Layers that read the same input, in the dtype that is computed in.

    Args:
        layers: with I inputs each.
        dtype: of the products.
        cast: A ``[S, I]`` and each B ``[O, R]`` in that dtype, from an earlier `Stack`; made if None.
    """

    def __init__(
        self, layers: Sequence[AdaptedWeight], dtype: torch.dtype, cast: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.layers, self.dtype = layers, dtype
        self._rows: tuple[torch.Tensor, Rows] | None = None  # an input in float8, once for all layers
        self.cuts: list[slice | None] = []
        begin = 0
        for layer in layers:
            rank = 0 if layer.a is None else layer.a.shape[0]
            self.cuts.append(slice(begin, begin + rank) if rank else None)
            begin += rank
        if cast is None:
            every = [layer.a for layer in layers if layer.a is not None]
            stacked = [(every[0] if len(every) == 1 else torch.cat(every)).to(dtype)] if every else []
            cast = [*stacked, *(layer.b.to(dtype) for layer in layers if layer.b is not None)]
        self.cast = list(cast)

    def _b(self) -> list[torch.Tensor | None]:
        given = iter(self.cast[1:])
        return [None if cut is None else next(given) for cut in self.cuts]

    def low(self, x: torch.Tensor) -> torch.Tensor | None:
        """``x Aᵀ`` ``[T, S]`` of all layers, None without updates."""
        return F.linear(x, self.cast[0]) if self.cast else None

    def products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``x W_iᵀ + bias_i`` ``[T, O_i]`` of each layer, without the updates."""
        return [self._product(x, layer) for layer in self.layers]

    def _product(self, x: torch.Tensor, layer: AdaptedWeight) -> torch.Tensor:
        bias = None if layer.bias is None else layer.bias.to(self.dtype)
        if not isinstance(layer.weight, Float8Weight):
            return F.linear(x, dense(layer.weight, self.dtype), bias)
        if torch.is_grad_enabled():  # in a graph
            return float8_linear(x, layer.weight, bias)
        if self._rows is None or self._rows[0] is not x:
            self._rows = x, quantise_rows(x)
        return product(self._rows[1], layer.weight, bias, self.dtype)

    def forward(self, x: torch.Tensor, low: torch.Tensor | None) -> list[torch.Tensor]:
        """``y_i`` ``[T, O_i]`` of each layer, with ``x Aᵀ`` of all.

        Without a bias the update is written first and the large product added to it, which hides the reading.
        """
        outputs = []
        for layer, cut, b in zip(self.layers, self.cuts, self._b(), strict=True):
            if low is None or b is None or cut is None:
                y = self._product(x, layer)
            elif torch.is_grad_enabled():  # in a graph, which puts it in place itself
                y = torch.addmm(self._product(x, layer), low[:, cut], b.t(), alpha=layer.scale)
            elif layer.bias is None and not isinstance(layer.weight, Float8Weight):
                y = x.new_empty(x.shape[0], b.shape[0]).addmm_(low[:, cut], b.t(), beta=0, alpha=layer.scale)
                y.addmm_(x, dense(layer.weight, self.dtype).t())
            else:
                y = self._product(x, layer).addmm_(low[:, cut], b.t(), alpha=layer.scale)
            outputs.append(y)
        return outputs

    def grad_inputs(
        self, grads: Sequence[torch.Tensor], low: torch.Tensor | None, wants_x: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of x and of ``x Aᵀ``."""
        grad_low = None if low is None else self.grad_low(grads, low)
        if not wants_x:
            return None, grad_low
        pairs = list(zip(self.layers, grads, strict=True))
        grad_x = None  # products in float8 write their results; all others are added to one by the product itself
        for layer, grad in pairs:
            if isinstance(layer.weight, Float8Weight):
                part = product_of_gradient(grad, layer.weight)
                grad_x = part if grad_x is None else grad_x.add_(part)
        if grad_low is not None:
            low = self.cast[0]
            grad_x = torch.mm(grad_low, low) if grad_x is None else grad_x.addmm_(grad_low, low)
        for layer, grad in pairs:
            if not isinstance(layer.weight, Float8Weight):
                weight = dense(layer.weight, self.dtype)
                grad_x = torch.mm(grad, weight) if grad_x is None else grad_x.addmm_(grad, weight)
        return grad_x, grad_low

    def grad_low(self, grads: Sequence[torch.Tensor], low: torch.Tensor) -> torch.Tensor:
        """Gradient of ``x Aᵀ``."""
        grad_low = torch.empty_like(low)
        for layer, grad, cut, b in zip(self.layers, grads, self.cuts, self._b(), strict=True):
            if cut is not None and b is not None:  # the scale goes into the product's own accumulators
                grad_low[:, cut].addmm_(grad, b, beta=0, alpha=layer.scale)
        return grad_low

    def grad_b(self, grads: Sequence[torch.Tensor], low: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradient of every layer's B."""
        found: list[torch.Tensor | None] = []
        for layer, grad, cut, b in zip(self.layers, grads, self.cuts, self._b(), strict=True):
            into = None if cut is None or b is None else torch.empty_like(b)
            found.append(into if into is None else into.addmm_(grad.t(), low[:, cut], beta=0, alpha=layer.scale))
        return found

    def grad_factors(
        self,
        grads: Sequence[torch.Tensor],
        grad_low: torch.Tensor | None,
        x: torch.Tensor,
        low: torch.Tensor | None,
        of_b: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """Gradients of every layer's A and B in the dtypes of the factors, in this order; ``of_b`` if known."""
        if grad_low is None or low is None:
            return [None] * (2 * len(self.layers))
        every_a = torch.mm(grad_low.t(), x)
        dtypes = {layer.a.dtype for layer in self.layers if layer.a is not None}
        if len(dtypes) == 1:
            every_a = every_a.to(dtypes.pop())  # in one launch
        found: list[torch.Tensor | None] = []
        for layer, cut, grad_b in zip(self.layers, self.cuts, of_b or self.grad_b(grads, low), strict=True):
            known = None if layer.b is None or grad_b is None else grad_b.to(layer.b.dtype)
            found += [None if cut is None or layer.a is None else every_a[cut].to(layer.a.dtype), known]
        return found


def lora_linear(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> tuple[torch.Tensor, ...]:
    """See `halftune_kernels.ops.lora_linear.lora_linear`; ``x`` is ``[T, I]``."""
    if torch.compiler.is_compiling():
        stack = Stack(layers, x.dtype)
        return tuple(stack.forward(x, stack.low(x)))
    factors = [tensor for layer in layers for tensor in (layer.a, layer.b)]
    outputs = _Stacked.apply(x, tuple(layers), *factors)
    assert isinstance(outputs, tuple)
    return outputs


class _Stacked(torch.autograd.Function):
    """The factors are arguments of their own, so that autograd sees them; ``layers`` holds them too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: tuple[AdaptedWeight, ...], *factors: Any) -> Any:
        stack = Stack(layers, x.dtype)
        low = stack.low(x)
        outputs = stack.forward(x, low)
        ctx.layers = [layer._replace(a=None, b=None) for layer in layers]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, low, *factors, *stack.cast)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x, low, *saved = ctx.saved_tensors
        count = 2 * len(ctx.layers)
        stack = Stack(with_factors(ctx.layers, saved[:count]), x.dtype, saved[count:])
        whole = [
            x.new_zeros(x.shape[0], layer.weight.shape[0]) if grad is None else grad
            for grad, layer in zip(grads, ctx.layers, strict=True)
        ]
        grad_x, grad_low = stack.grad_inputs(whole, low, ctx.needs_input_grad[0])
        return grad_x, None, *stack.grad_factors(whole, grad_low, x, low)


def with_factors(layers: Sequence[AdaptedWeight], factors: Sequence[Any]) -> list[AdaptedWeight]:
    """Layers with A and B from a flat list of both."""
    return [layer._replace(a=factors[2 * i], b=factors[2 * i + 1]) for i, layer in enumerate(layers)]
