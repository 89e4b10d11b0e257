"""Linear layers with low-rank updates on one input as a single autograd function, in chunks that stay in the cache.

Shapes: T rows, N rows of a chunk, I inputs, O outputs, R rank. Runs on every device; the chunks are for CPUs. Every
product is written so that the matrix library finds its fast path at R = 8: ``hᵀ g`` runs four to ten times as fast as
``gᵀ h``, and ``g B`` needs the transpose of B at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.lora_linear.reference import AdaptedWeight, dense

# Rows of a chunk on one thread. Few enough that elementwise passes find their operands in the cache, and enough that
# reading the weights once per chunk is cheap beside the product. Half formats are not cut: each product rounds its
# result, so that a gradient summed over chunks would be rounded once a chunk, and they would gain 3 % at most.
_ROWS = {8: 128, 4: 384}


def rows_per_chunk(rows: int, like: torch.Tensor) -> int:
    """Rows to work on at a time: what suits the caches of a CPU, everything elsewhere.

    Args:
        rows: of the whole input.
        like: gives dtype and device.
    """
    if like.device.type != "cpu" or like.element_size() not in _ROWS:
        return max(rows, 1)
    return _ROWS[like.element_size()] * torch.get_num_threads()


class Projection:
    """An ``AdaptedWeight`` in the dtype that is computed in.

    Args:
        layer: frozen weight and update.
        dtype: of the products. The gradients of A and B are summed over chunks in fp32 (fp64 for fp64), and returned in
            the dtypes of A and B.
    """

    def __init__(self, layer: AdaptedWeight, dtype: torch.dtype) -> None:
        self.layer = layer
        self.weight = dense(layer.weight, dtype)
        self.bias = None if layer.bias is None else layer.bias.to(dtype)
        self.scale = layer.scale
        self.adapted = layer.a is not None and layer.b is not None
        if layer.a is not None and layer.b is not None:
            self.a, self.b = layer.a.to(dtype), layer.b.to(dtype)
            exact = torch.promote_types(dtype, torch.float32)
            # the scale goes in here, rounded once, and not into a product that is rounded already
            self._b_scaled = (layer.b.to(exact) * layer.scale).to(dtype).t().contiguous()
            self._direct = dtype == exact
            self._grad_a = torch.zeros(self.a.shape, dtype=exact, device=self.a.device)
            self._grad_b = torch.zeros(self._b_scaled.shape, dtype=exact, device=self.a.device)

    def empty_low(self, rows: int) -> torch.Tensor | None:
        """Room for ``x Aᵀ`` of all rows."""
        return self.weight.new_empty(rows, self.a.shape[0]) if self.adapted else None

    def forward(self, x: torch.Tensor, out: torch.Tensor, low: torch.Tensor | None) -> None:
        """Writes ``y`` ``[N, O]`` to ``out`` and ``x Aᵀ`` ``[N, R]`` to ``low``."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        if low is not None:
            torch.mm(x, self.a.t(), out=low)
            out.addmm_(low, self.b.t(), alpha=self.scale)

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        low: torch.Tensor | None,
        grad_x: torch.Tensor | None,
        *,
        accumulate: bool = False,
    ) -> None:
        """Adds to the gradients of A and B and writes that of ``x``.

        Args:
            grad: of ``y``, ``[N, O]``.
            x, low: as in ``forward``.
            grad_x: ``[N, I]`` to write to, or to add to with ``accumulate``; None where nobody needs it.
            accumulate: whether ``grad_x`` holds something already.
        """
        if grad_x is not None:
            if accumulate:
                grad_x.addmm_(grad, self.weight)
            else:
                torch.mm(grad, self.weight, out=grad_x)
        if low is None:
            return
        grad_low = torch.mm(grad, self._b_scaled.t())
        if grad_x is not None:
            grad_x.addmm_(grad_low, self.a)
        if self._direct:
            self._grad_a.addmm_(grad_low.t(), x)
            self._grad_b.addmm_(low.t(), grad)
        else:
            self._grad_a.add_(torch.mm(grad_low.t(), x))
            self._grad_b.add_(torch.mm(low.t(), grad))

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of A ``[R, I]`` and B ``[O, R]`` after the last chunk."""
        if self.layer.a is None or self.layer.b is None:
            return None, None
        grad_b = self._grad_b.mul_(self.scale).t().contiguous()
        return self._grad_a.to(self.layer.a.dtype), grad_b.to(self.layer.b.dtype)


def lora_linear(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> tuple[torch.Tensor, ...]:
    """See `halftune_kernels.ops.lora_linear.lora_linear`; ``x`` is ``[T, I]``."""
    factors = [tensor for layer in layers for tensor in (layer.a, layer.b)]
    outputs = _LoraLinear.apply(x, tuple(layers), *factors)
    assert isinstance(outputs, tuple)
    return outputs


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
