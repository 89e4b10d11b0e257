"""Linear layers whose frozen weight is in float8: the input and its gradient are rounded by rows, products accumulate
in fp32.

The scales of a weight belong to its outputs. They leave the forward product as factors of its columns; the gradient of
the input sums over outputs, so that there they become factors of the incoming gradient, before it is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.float8_rows import quantise_rows

__all__ = ["Float8Weight", "Rows", "fits", "float8_linear", "product", "product_of_gradient", "quantised"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Float8 values ``[T, C]`` and their scales ``[T, 1]``."""
_MULTIPLE = 16  # what torch._scaled_mm requires of both sides of a weight


class Float8Weight(NamedTuple):
    """A frozen weight in float8_e4m3fn.

    Attributes:
        values: ``[O, I]``.
        scales: fp32 ``[O, 1]``, of the outputs.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """O, I."""
        return self.values.shape

    @property
    def make(self) -> Callable[[], torch.Tensor]:
        """Gives the weight in bf16, as that of a packed one."""
        return lambda: (self.values.to(torch.float32) * self.scales).to(torch.bfloat16)

    def rows(self, cut: slice) -> Float8Weight:
        """Some of the outputs."""
        return Float8Weight(self.values[cut], self.scales[cut])


def fits(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a weight of this shape can be multiplied in float8."""
    return len(shape) == 2 and not any(size % _MULTIPLE for size in shape)


def quantised(weight: torch.Tensor) -> Float8Weight:
    """A weight ``[O, I]`` in float8."""
    return Float8Weight(*quantise_rows(weight.detach()))


def product(x: Rows, weight: Float8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``x Wᵀ + bias`` ``[T, O]`` in ``dtype``; GPUs have bf16 only."""
    return _multiply(x, weight.values.t(), weight.scales.t(), bias, dtype, fast=True)


def product_of_gradient(grad: torch.Tensor, weight: Float8Weight) -> torch.Tensor:
    """``grad W`` ``[T, I]`` in the dtype of ``grad``.

    The product wants the weight's columns side by side: they are turned at each use, which costs 2 bytes of traffic per
    weight and saves a copy of the model.
    """
    rows = quantise_rows(grad, weight.scales.view(-1))
    turned = weight.values.t().contiguous().t()
    ones = torch.ones(1, turned.shape[1], dtype=torch.float32, device=turned.device)
    return _multiply(rows, turned, ones, None, grad.dtype, fast=False)


def _multiply(
    x: Rows, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, fast: bool
) -> torch.Tensor:
    values, own = x
    if values.device.type == "cpu":  # the same numbers, slowly
        out = (values.to(torch.float32) @ weight.to(torch.float32)) * own * scales
        return (out if bias is None else out + bias).to(dtype)
    given = {"scale_a": own, "scale_b": scales, "bias": bias, "out_dtype": dtype, "use_fast_accum": fast}
    return torch._scaled_mm(values, weight, **given)  # type: ignore[reportPrivateImportUsage]


def float8_linear(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x Wᵀ + bias`` for ``x`` ``[..., I]``; ``[..., O]`` in its dtype. Only ``x`` has a gradient; nothing is kept."""
    out = _Float8Linear.apply(x.reshape(-1, x.shape[-1]), weight.values, weight.scales, bias)
    assert isinstance(out, torch.Tensor)
    return out.view(*x.shape[:-1], out.shape[-1])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(values, scales)
        return product(quantise_rows(x), Float8Weight(values, scales), bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return product_of_gradient(grad, Float8Weight(*ctx.saved_tensors)), None, None, None
