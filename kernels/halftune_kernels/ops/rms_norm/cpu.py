"""Root-mean-square normalisation in chunks of rows that stay in the cache.

Shapes: T rows, H channels. Computed in fp32 (fp64 for fp64) and rounded once; kept for the backward pass: the input and
one number per row. Runs on every device; the chunks are for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.lora_linear.cpu import rows_per_chunk


class Norm(NamedTuple):
    """As every implementation gets it; the fields are arguments of the registered operators.

    Attributes:
        weight: ``[H]``.
        eps: added to the mean square.
        offset: added to the weight.
        rounds: whether the normalised value is rounded to the dtype of the rows before the weight.
        dtype: of the result.
    """

    weight: torch.Tensor
    eps: float
    offset: float
    rounds: bool
    dtype: torch.dtype


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm ``[T, H]`` of rows ``[T, H]``; see `halftune_kernels.ops.rms_norm.rms_norm`."""
    out = _RmsNorm.apply(x, *norm)
    assert isinstance(out, torch.Tensor)
    return out


def forward(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm ``[T, H]``, and 1 / root mean square ``[T, 1]``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale, width = norm.weight.to(wide) + norm.offset, x.shape[1]
    out = torch.empty(x.shape, dtype=norm.dtype, device=x.device)
    inverse = torch.empty(x.shape[0], 1, dtype=wide, device=x.device)
    step = rows_per_chunk(x.shape[0], inverse)
    for start in range(0, x.shape[0], step):
        cut = slice(start, start + step)
        chunk, r, y = x[cut].to(wide), inverse[cut], out[cut]
        torch.linalg.vector_norm(chunk, dim=-1, keepdim=True, out=r)
        r.square_().div_(width).add_(norm.eps).rsqrt_()
        if norm.rounds and x.dtype != wide:
            y.copy_((chunk * r).to(x.dtype).to(wide).mul_(scale))
        elif norm.dtype == wide:
            torch.mul(chunk, r, out=y).mul_(scale)
        else:
            y.copy_((chunk * r).mul_(scale))
    return out, inverse


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    norm: Norm,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """With n = x r and a = grad · scale: dx = r (a - n · mean(a n)), dweight = Σ grad · n over the rows."""
    wide, width = inverse.dtype, x.shape[1]
    scale = norm.weight.to(wide) + norm.offset
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else None
    grad_weight = torch.zeros_like(scale) if wanted[1] else None
    step = rows_per_chunk(x.shape[0], inverse)
    for start in range(0, x.shape[0], step):
        cut = slice(start, start + step)
        normed, g = x[cut].to(wide) * inverse[cut], grad[cut].to(wide)
        if grad_weight is not None:
            grad_weight += (g * (normed.to(x.dtype) if norm.rounds else normed)).sum(0)
        if grad_x is not None:
            a = g * scale
            mean = (a * normed).sum(-1, keepdim=True).div_(-width)
            a.addcmul_(normed, mean).mul_(inverse[cut])
            grad_x[cut] = a
    return grad_x, None if grad_weight is None else grad_weight.to(norm.weight.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
        out, inverse = forward(x, Norm(weight, *options))
        ctx.save_for_backward(x, weight, inverse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        found = backward(grad, x, inverse, Norm(weight, *ctx.options), ctx.needs_input_grad[:2])
        return *found, None, None, None, None
