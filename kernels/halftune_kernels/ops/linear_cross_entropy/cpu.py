"""Cross-entropy of a linear head as one autograd function: logits, loss and gradient of a few rows at a time.

Shapes: N rows, H hidden size, V vocabulary. The gradients are computed in the forward pass, while the logits of a chunk
are at hand; the backward pass only scales them. Runs on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_NO_LABEL = -100
# Bytes of a chunk's fp32 logits, and the fewest rows: reading the head once per chunk must stay cheap.
_CHUNK_BYTES = {"cpu": 4 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
_FEWEST_ROWS = 128


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    all_labelled: bool = False,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``Σ -log softmax(hidden Wᵀ + bias)[target]`` over the rows that have a target.

    With label smoothing ε, a row's loss is ``(1 - ε) · -log p[target] + ε/V · Σ_v -log p[v]`` with the softmax p, as in
    ``torch.nn.functional.cross_entropy`` (Szegedy et al. 2016, arXiv:1512.00567).

    The products are computed in the dtype of ``hidden``, to which the weights are cast; softmax, loss and the sums over
    chunks in fp32 (fp64 for fp64).

    Args:
        hidden: ``[N, H]``, a floating dtype.
        weight: ``[V, H]``; gets a gradient where it wants one.
        targets: ``[N]`` int64, -100 for none.
        bias: ``[V]`` or None, likewise.
        scale: what the backward pass will multiply the result with, as far as known: half formats are then rounded
            once, as the separate operations would round them. Any other factor is right, too.
        all_labelled: that every row has a target; otherwise a GPU is waited for to learn which do.
        label_smoothing: ε, from 0 to 1.

    Returns:
        A scalar, fp32 or fp64.
    """
    wanted = torch.is_grad_enabled()
    out = _LinearCrossEntropySum.apply(hidden, weight, bias, targets, scale, wanted, all_labelled, label_smoothing)
    assert isinstance(out, torch.Tensor)
    return out


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        wanted: bool,
        all_labelled: bool,
        smoothing: float,
    ) -> torch.Tensor:
        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        shift = None if bias is None else bias.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
        grad_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs[2] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        kept = None if all_labelled else (targets != _NO_LABEL).nonzero().squeeze(1)
        if kept is not None and kept.numel() == targets.numel():
            kept = None  # slices are views, an index copies
        count = targets.numel() if kept is None else kept.numel()
        step = _rows(weight.shape[0], hidden.device)
        for start in range(0, count, step):
            index = slice(start, start + step) if kept is None else kept[start : start + step]
            rows, target = hidden[index], targets[index, None]
            chances = F.log_softmax(F.linear(rows, head, shift), dim=-1, dtype=wide)
            total -= (1 - smoothing) * chances.gather(1, target).sum(dtype=torch.float64)
            if smoothing:
                total -= smoothing / chances.shape[1] * chances.sum(dtype=torch.float64)
            if not any(needs):
                continue
            chances.exp_().scatter_add_(1, target, chances.new_full((1, 1), smoothing - 1.0).expand_as(target))
            if smoothing:
                chances.sub_(smoothing / chances.shape[1])
            grad = chances.mul_(scale).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[index] = torch.mm(grad, head)
            if grad_weight is not None:
                grad_weight += torch.mm(grad.t(), rows)
            if grad_bias is not None:
                grad_bias += chances.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.scale, ctx.dtypes = scale, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        factor = grad / ctx.scale
        as_expected = grad.device.type == "cpu" and bool(factor == 1)
        gradients = []
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if saved is None:
                gradients.append(None)
            else:
                gradients.append(saved.to(dtype) if as_expected else (saved * factor).to(dtype))
        return *gradients, None, None, None, None, None


def _rows(vocabulary: int, device: torch.device) -> int:
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE)
    return max(_FEWEST_ROWS, budget // (4 * vocabulary))
