"""Summed cross-entropy of existing logits, without a second copy of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halftune.data.example import NO_LABEL

# Bytes of fp32 scratch per chunk of rows: fits the cache on a CPU, keeps other devices busy.
_CHUNK_BYTES = {"cpu": 2 << 20}
_CHUNK_BYTES_ELSEWHERE = 64 << 20

# Operations whose backward pass does not read their result: the gradient may overwrite it. Views and dtype conversions
# do not save it either.
_KEEP_NO_RESULT = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Linear", "View", "UnsafeView", "ReshapeAlias", "Mul", "Div", "Add", "ToCopy")
)


def cross_entropy_sum(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
    overwrite: bool | None = None,
    all_labelled: bool = False,
) -> torch.Tensor:
    """Sum of ``-log softmax(logits)[target]`` over rows with a target, accumulated in fp32.

    The fp32 copy is at most one chunk of rows, and the gradient overwrites the logits if nothing else needs them. Same
    rounding as ``F.cross_entropy(logits.float(), targets, reduction="sum")``.

    Args:
        logits: ``[N, V]``, any float dtype.
        targets: ``[N]`` int64, -100 for none.
        chunk_bytes: of the fp32 scratch; the default depends on the device.
        overwrite: whether the gradient may overwrite ``logits``; by default only if the operation that produced them is
            known not to save them.
        all_labelled: every row has a target; otherwise finding the targets synchronises with the device.

    Returns:
        An fp32 scalar; fp64 for fp64 logits.
    """
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ELSEWHERE)
    if overwrite is None:
        overwrite = _may_overwrite(logits)
    rows = max(1, chunk_bytes // (4 * logits.shape[-1]))
    with torch.autocast(logits.device.type, enabled=False):
        return _CrossEntropySum.apply(logits, targets, rows, overwrite, all_labelled)  # type: ignore[return-value]


class _CrossEntropySum(torch.autograd.Function):
    """Saves log Σ exp per row; backward recomputes the softmax from it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rows: int, overwrite: bool, all_labelled: bool
    ) -> torch.Tensor:
        every = torch.arange(targets.numel(), device=targets.device)
        kept = every if all_labelled else (targets != NO_LABEL).nonzero().squeeze(1)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_sums = torch.zeros(targets.shape[0], 1, dtype=exact, device=logits.device)
        losses = torch.zeros_like(log_sums)
        everywhere = kept.numel() == targets.numel()
        for start in range(0, kept.numel(), rows):
            index = slice(start, start + rows) if everywhere else kept[start : start + rows]
            chunk, target = logits[index], targets[index, None]
            # log_softmax is one fused pass; log Σ exp follows from what it did to the target's logit.
            at_target = F.log_softmax(chunk, dim=-1, dtype=exact).gather(1, target)
            losses[index] = at_target.neg()
            log_sums[index] = chunk.gather(1, target).to(exact) - at_target
        ctx.save_for_backward(logits, targets, log_sums, kept)
        ctx.rows, ctx.overwrite = rows, overwrite
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, log_sums, kept = ctx.saved_tensors
        everywhere = kept.numel() == targets.numel()
        # detach shares the version counter: another user of the logits gets an error instead of a wrong gradient.
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        if not everywhere:
            out = out if ctx.overwrite else out.zero_()
        one = torch.ones((), dtype=log_sums.dtype, device=logits.device)
        for start in range(0, kept.numel(), ctx.rows):
            index = slice(start, start + ctx.rows) if everywhere else kept[start : start + ctx.rows]
            target = targets[index, None]
            softmax = logits[index].to(log_sums.dtype, copy=True).sub_(log_sums[index]).exp_()
            softmax.scatter_add_(1, target, -one.expand_as(target))
            out[index] = softmax.mul_(grad).to(out.dtype)
        if ctx.overwrite and not everywhere:
            out.masked_fill_((targets == NO_LABEL)[:, None], 0)
        return out, None, None, None, None


def _may_overwrite(logits: torch.Tensor) -> bool:
    """Whether ``logits`` are views of the result of an operation that does not save it."""
    node = logits.grad_fn
    while node is not None and node.name() in _KEEP_NO_RESULT:
        if not node.name().endswith(("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")):
            return True
        node = node.next_functions[0][0]
    return False
