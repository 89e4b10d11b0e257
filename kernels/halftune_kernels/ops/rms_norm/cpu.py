"""Root-mean-square normalisation as one autograd function, in chunks of rows that stay in the cache.

Shapes: T rows, H channels. Computed in fp32 (fp64 for fp64) and rounded once; kept for the backward pass: the input and
one number per row. Runs on every device; the chunks are for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.lora_linear.cpu import rows_per_chunk


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x / √(mean(x²) + eps) · (weight + offset)`` over the last dimension.

    Args:
        x: ``[..., H]``, a floating dtype.
        weight: ``[H]``.
        eps: added to the mean square.
        offset: 1 for models whose weights are around zero.
        dtype: of the result; that of ``x`` by default.

    Returns:
        ``[..., H]``, contiguous.
    """
    out = _RmsNorm.apply(x.reshape(-1, x.shape[-1]), weight, eps, offset, dtype or x.dtype)
    assert isinstance(out, torch.Tensor)
    return out.view(x.shape)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, dtype: torch.dtype
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale, width = weight.to(wide) + offset, x.shape[1]
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        inverse = torch.empty(x.shape[0], 1, dtype=wide, device=x.device)
        step = rows_per_chunk(x.shape[0], inverse)
        for start in range(0, x.shape[0], step):
            cut = slice(start, start + step)
            chunk, r, y = x[cut].to(wide), inverse[cut], out[cut]
            torch.linalg.vector_norm(chunk, dim=-1, keepdim=True, out=r)
            r.square_().div_(width).add_(eps).rsqrt_()
            if dtype == wide:
                torch.mul(chunk, r, out=y).mul_(scale)
            else:
                y.copy_((chunk * r).mul_(scale))
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.step = offset, step
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """With n = x r and a = grad · scale: dx = r (a - n · mean(a n)), dweight = Σ grad · n over the rows."""
        x, weight, inverse = ctx.saved_tensors
        wide, width = inverse.dtype, x.shape[1]
        scale = weight.to(wide) + ctx.offset
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(scale) if ctx.needs_input_grad[1] else None
        for start in range(0, x.shape[0], ctx.step):
            cut = slice(start, start + ctx.step)
            normed, g = x[cut].to(wide) * inverse[cut], grad[cut].to(wide)
            if grad_weight is not None:
                grad_weight += (g * normed).sum(0)
            if grad_x is not None:
                a = g * scale
                mean = (a * normed).sum(-1, keepdim=True).div_(-width)
                a.addcmul_(normed, mean).mul_(inverse[cut])
                grad_x[cut] = a
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
