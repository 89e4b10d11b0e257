"""Cross-entropy of logits that exist, a few rows at a time, without a second copy of them.

It stands beside ``linear_cross_entropy_sum``, which makes the logits of a plain head itself and takes their gradient in
the forward pass, since all rows of its sum have one factor. Here each row has a factor of its own, which only the
backward pass knows: half formats would be rounded before and after it. So the softmax is computed again there, from the
logits and log Σ exp of each row; it differs from the exponential of ``log_softmax`` in the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halftune.data.store import NO_LABEL

# Bytes of fp32 scratch per chunk of rows: fits the cache on a CPU, keeps other devices busy.
_LOSS_CHUNK_BYTES = {"cpu": 2 << 20}
_LOSS_CHUNK_BYTES_ELSEWHERE = 64 << 20

# Operations whose backward pass does not read their result: the gradient may overwrite it. Views and dtype conversions
# do not save it either.
_KEEP_NO_RESULT = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Linear", "View", "UnsafeView", "ReshapeAlias", "Mul", "Div", "Add", "ToCopy")
)


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """Sum of :func:`cross_entropy_rows`: an fp32 scalar; fp64 for fp64 logits."""
    return cross_entropy_rows(logits, targets, **options).sum()


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
    overwrite: bool | None = None,
    all_labelled: bool = False,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``-log softmax(logits)[target]`` of each row, computed in fp32; 0 for a row without a target.

    The fp32 copy is at most one chunk of rows, and the gradient overwrites the logits if nothing else needs them. Same
    rounding as ``F.cross_entropy(logits.float(), targets, reduction="none")``.

    Args:
        logits: ``[N, V]``, any float dtype.
        targets: ``[N]`` int64, -100 for none.
        chunk_bytes: of the fp32 scratch; the default depends on the device.
        overwrite: whether the gradient may overwrite ``logits``; by default only if the operation that produced them is
            known not to save them.
        all_labelled: every row has a target; otherwise finding the targets synchronises with the device.
        label_smoothing: as in ``F.cross_entropy``; see ``linear_cross_entropy_sum``.

    Returns:
        fp32 ``[N]``; fp64 for fp64 logits.
    """
    if overwrite is None:
        overwrite = _may_overwrite(logits)
    rows = scratch_rows(logits) if chunk_bytes is None else max(1, chunk_bytes // (4 * logits.shape[-1]))
    with torch.autocast(logits.device.type, enabled=False):
        found = _CrossEntropy.apply(logits, targets, rows, overwrite, all_labelled, label_smoothing)
        return found  # type: ignore[return-value]


def scratch_rows(logits: torch.Tensor) -> int:
    """Rows of logits whose fp32 scratch fits the cache."""
    size = _LOSS_CHUNK_BYTES.get(logits.device.type, _LOSS_CHUNK_BYTES_ELSEWHERE)
    return max(1, size // (4 * logits.shape[-1]))


class _CrossEntropy(torch.autograd.Function):
    """Saves log Σ exp per row; backward recomputes the softmax from it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
        overwrite: bool,
        all_labelled: bool,
        smoothing: float,
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
            chances = F.log_softmax(chunk, dim=-1, dtype=exact)
            at_target = chances.gather(1, target)
            losses[index] = at_target.neg()
            if smoothing:
                losses[index] = (smoothing - 1) * at_target - smoothing * chances.mean(1, keepdim=True)
            del chances  # one chunk at a time
            log_sums[index] = chunk.gather(1, target).to(exact) - at_target
        ctx.save_for_backward(logits, targets, log_sums, kept)
        ctx.rows, ctx.overwrite, ctx.smoothing = rows, overwrite, smoothing
        return losses.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, log_sums, kept = ctx.saved_tensors
        everywhere = kept.numel() == targets.numel()
        # detach shares the version counter: another user of the logits gets an error instead of a wrong gradient.
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        if not everywhere:
            out = out if ctx.overwrite else out.zero_()
        at_target = torch.full((), ctx.smoothing - 1, dtype=log_sums.dtype, device=logits.device)
        for start in range(0, kept.numel(), ctx.rows):
            index = slice(start, start + ctx.rows) if everywhere else kept[start : start + ctx.rows]
            target = targets[index, None]
            softmax = logits[index].to(log_sums.dtype, copy=True).sub_(log_sums[index]).exp_()
            softmax.scatter_add_(1, target, at_target.expand_as(target))
            if ctx.smoothing:
                softmax.sub_(ctx.smoothing / logits.shape[-1])
            out[index] = softmax.mul_(grad[index, None]).to(out.dtype)
        if ctx.overwrite and not everywhere:
            out.masked_fill_((targets == NO_LABEL)[:, None], 0)
        return out, None, None, None, None, None


def _may_overwrite(logits: torch.Tensor) -> bool:
    """Whether ``logits`` are views of the result of an operation that does not save it."""
    node = logits.grad_fn
    while node is not None and node.name() in _KEEP_NO_RESULT:
        if not node.name().endswith(("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")):
            return True
        node = node.next_functions[0][0]
    return False
