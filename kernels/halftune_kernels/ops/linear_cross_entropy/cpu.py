"""Cross-entropy of a linear head as one autograd function: logits, loss and gradient of a few rows at a time.

Shapes: N rows, H hidden size, V vocabulary. The gradients are computed in the forward pass, while the logits of a chunk
are at hand; the backward pass only scales them. Runs on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halftune_kernels.library import opaque

_NO_LABEL = -100
# Bytes of a chunk's fp32 logits, and the fewest rows: reading the head once per chunk must stay cheap, and so must
# adding to its gradient, in fp32, where it has one.
_CHUNK_BYTES = {"cpu": 4 << 20}
_CHUNK_BYTES_ELSEWHERE, _CHUNK_BYTES_TRAINED = 256 << 20, 1 << 30
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
    backend: str | None = None,
) -> torch.Tensor:
    """``Σ -log softmax(hidden Wᵀ + bias)[target]`` over the rows that have a target.

    With label smoothing ε, a row's loss is ``(1 - ε) · -log p[target] + ε/V · Σ_v -log p[v]`` with the softmax p, as in
    ``torch.nn.functional.cross_entropy`` (Szegedy et al. 2016, arXiv:1512.00567).

    The products are computed in the dtype of ``hidden``, to which the weights are cast; softmax, loss and the sums over
    chunks in fp32 (fp64 for fp64).

    Args:
        hidden: ``[N, H]``, a floating dtype.
        weight: ``[V, H]``; gets a gradient where it wants one.
        targets: ``[N]`` int64, -100 for none. One beyond the vocabulary is an error on CPUs; in Triton, which does not
            wait for the device, the loss is NaN.
        bias: ``[V]`` or None, likewise.
        scale: what the backward pass will multiply the result with, as far as known: half formats are then rounded
            once, as the separate operations would round them. Any other factor is right, too.
        all_labelled: that every row has a target; otherwise a CPU leaves out those without. Elsewhere they are computed
            like the others, without waiting for the device to learn which they are.
        label_smoothing: ε, from 0 to 1.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        A scalar, fp32 or fp64.
    """
    wanted = torch.is_grad_enabled()
    if backend == "reference":
        from halftune_kernels.ops.linear_cross_entropy.reference import reference

        return reference(hidden, weight, targets, bias, label_smoothing=label_smoothing)
    if backend is not None or opaque(hidden):
        options = scale, label_smoothing, wanted, backend
        out = _InPlace.apply(hidden, weight, bias, targets, *options)
        assert isinstance(out, torch.Tensor)
        return out
    out = _LinearCrossEntropySum.apply(hidden, weight, bias, targets, scale, wanted, all_labelled, label_smoothing)
    assert isinstance(out, torch.Tensor)
    return out


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        scale: float, wanted: bool, all_labelled: bool, smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head, shift, grad_weight, grad_bias = _begin(hidden, weight, bias, needs)
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for index in _chunks(targets, rows_at_a_time(weight.shape[0], hidden.device), all_labelled):
            rows, target = hidden[index], targets[index, None]
            chances = F.log_softmax(F.linear(rows, head, shift), dim=-1, dtype=wide)
            total -= (1 - smoothing) * chances.gather(1, target).sum(dtype=torch.float64)
            if smoothing:
                total -= smoothing / chances.shape[1] * chances.sum(dtype=torch.float64)
            if not any(needs):
                continue
            grad = _gradient(chances, target, scale, smoothing).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[index] = torch.mm(grad, head)
            if grad_weight is not None:
                grad_weight += torch.mm(grad.t(), rows)
            if grad_bias is not None:
                grad_bias += chances.sum(0)
        _keep(ctx, scale, (hidden, weight, bias), (grad_hidden, grad_weight, grad_bias))
        return total.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_scaled(ctx, grad), None, None, None, None, None


class _InPlace(torch.autograd.Function):
    """The same in one pass over each chunk of logits, which becomes its gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor,
        scale: float, smoothing: float, wanted: bool, backend: str | None,
    ) -> torch.Tensor:  # fmt: skip
        from halftune_kernels.ops.linear_cross_entropy.operators import LOSSES  # for GPUs and graphs

        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head, shift, grad_weight, grad_bias = _begin(hidden, weight, bias, needs)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        losses, step = [], rows_at_a_time(weight.shape[0], hidden.device, trained=needs[1])
        for rows, target, place in zip(
            hidden.split(step),
            targets.split(step),
            (hidden if grad_hidden is None else grad_hidden).split(step),
            strict=True,
        ):
            grad = F.linear(rows, head, shift)
            losses.append(LOSSES(grad, target, scale, smoothing, any(needs), backend))
            if grad_hidden is not None:
                torch.mm(grad, head, out=place)
            if grad_weight is not None:
                grad_weight += torch.mm(grad.t(), rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            del grad  # before the next chunk's logits
        _keep(ctx, scale, (hidden, weight, bias), (grad_hidden, grad_weight, grad_bias))
        return torch.cat(losses).sum(dtype=torch.float64).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_scaled(ctx, grad), None, None, None, None, None


def _begin(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: list[bool]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias in the dtype of ``hidden``, and zeros for their gradients, in fp32 or fp64, where needed."""
    shift = None if bias is None else bias.to(hidden.dtype)
    wide = {"dtype": torch.promote_types(hidden.dtype, torch.float32), "device": weight.device}
    grad_weight = torch.zeros(weight.shape, **wide) if needs[1] else None
    grad_bias = torch.zeros(weight.shape[0], **wide) if needs[2] else None
    return weight.to(hidden.dtype), shift, grad_weight, grad_bias


def _chunks(targets: torch.Tensor, step: int, all_labelled: bool) -> Iterator[slice | torch.Tensor]:
    """Indices of at most ``step`` rows that have a target: slices, which are views, where all have one."""
    kept = None if all_labelled else (targets != _NO_LABEL).nonzero().squeeze(1)
    if kept is not None and kept.numel() < targets.numel():
        yield from kept.split(step) if kept.numel() else ()
    else:
        yield from (slice(start, start + step) for start in range(0, targets.numel(), step))


def _gradient(chances: torch.Tensor, target: torch.Tensor, scale: float, smoothing: float) -> torch.Tensor:
    """Gradient of the logits times ``scale``, in place of their log-probabilities."""
    chances.exp_().scatter_add_(1, target, chances.new_full((1, 1), smoothing - 1.0).expand_as(target))
    if smoothing:
        chances.sub_(smoothing / chances.shape[1])
    return chances.mul_(scale)


def _keep(ctx: Any, scale: float, inputs: tuple[torch.Tensor | None, ...], gradients: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*gradients)
    ctx.scale, ctx.dtypes = scale, [None if one is None else one.dtype for one in inputs]


def _scaled(ctx: Any, grad: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of the forward pass, times what the result's gradient is beyond the scale."""
    factor = grad / ctx.scale
    as_expected = not opaque(grad) and bool(factor == 1)
    gradients: list[torch.Tensor | None] = []
    for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
        if saved is None:
            gradients.append(None)
        else:
            gradients.append(saved.to(dtype) if as_expected else (saved * factor).to(dtype))
    return gradients


def losses_in_place(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, smoothing: float, wanted: bool
) -> torch.Tensor:
    """Losses ``[N]``, fp32 (fp64 for fp64); ``logits`` become their gradient times ``scale`` if ``wanted``."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    labelled, target = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
    chances = F.log_softmax(logits, dim=-1, dtype=wide)
    losses = (1 - smoothing) * -chances.gather(1, target)
    if smoothing:
        losses -= smoothing * chances.mean(1, keepdim=True)
    if wanted:
        logits.copy_(_gradient(chances, target, scale, smoothing).masked_fill_(~labelled, 0.0))
    return losses.masked_fill_(~labelled, 0.0).squeeze(1)


def rows_at_a_time(vocabulary: int, device: torch.device, *, trained: bool = False) -> int:
    """Rows per chunk for a device; of a trained head more on a GPU."""
    elsewhere = _CHUNK_BYTES_TRAINED if trained else _CHUNK_BYTES_ELSEWHERE
    return max(_FEWEST_ROWS, _CHUNK_BYTES.get(device.type, elsewhere) // (4 * vocabulary))
