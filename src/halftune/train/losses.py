"""The training loss: a sum of cross-entropies; logits at labelled positions only, and never a second copy of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from halftune.data.sample import NO_LABEL
from halftune.train.feed import LABEL_POSITIONS
from halftune.train.head import head_loss_sum, hidden_instead_of_logits, plain_head

# fp32 scratch for a chunk of rows: on a CPU it stays in the cache, elsewhere it is large enough to fill the device.
_CHUNK_BYTES = {"cpu": 2 << 20}
_CHUNK_BYTES_ELSEWHERE = 64 << 20

# Producers of logits whose backward pass does not look at their own result, which may therefore be overwritten with its
# gradient. Views and dtype conversions on the way keep no result either.
_KEEP_NO_RESULT = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Linear", "View", "UnsafeView", "ReshapeAlias", "Mul", "Div", "Add", "ToCopy")
)


def forward_loss_sum(
    model: nn.Module, batch: Mapping[str, Any], *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the model and sums the cross-entropy over the labelled tokens.

    The model computes logits only at positions that predict a label of some row (where its forward takes
    ``logits_to_keep``), by its own head: soft-capping, scaling, tied and adapted heads stay its business. Where the
    logits are a linear head's product and nothing else, they are never held together: loss and gradient are taken from
    a few rows at a time, and the head is not called. A model that returns an auxiliary loss (mixture of experts with
    ``output_router_logits``) has it added while gradients are taken, with the model's own coefficient and weighted by
    the number of labels, as transformers does.

    Args:
        model: a causal language model, as built or wrapped by peft or for several processes.
        batch: what the collator made, on the model's device; ``labels`` ``[B, T]`` are not shifted, -100 is no label.
            Without the feed's ``LABEL_POSITIONS`` they are found here, which waits for the device.
        scale: what the loss will be multiplied with before the backward pass; see ``linear_cross_entropy_sum``.

    Returns:
        The sum in nats (fp32 scalar; fp64 for an fp64 model), and the number of labels (int64 scalar). Without any
        label the sum is zero and still has a graph through every weight.
    """
    inputs = dict(batch)
    # The label at t is predicted from t - 1.
    targets = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=NO_LABEL)
    labelled = targets != NO_LABEL
    count = labelled.sum()
    known = inputs.pop(LABEL_POSITIONS, None)
    positions = labelled.any(dim=0).nonzero().squeeze(1) if known is None else known
    # A single row has a label at each of its positions.
    all_labelled = len(labelled) == 1 and positions.numel() > 0
    if positions.numel() == 0:
        positions = positions.new_zeros(1)
    targets = targets[:, positions]
    whole = _whole(model)
    base = _base(whole)
    # a graph would not notice that its head is another for a moment
    compiled = whole._compiled_call_impl is not None
    head = None if compiled else plain_head(base, inputs)
    takes_positions = _takes_positions(type(base))
    if takes_positions:
        inputs["logits_to_keep"] = positions
    with nullcontext() if head is None else hidden_instead_of_logits(head):
        outputs = model(**inputs, use_cache=False)
    logits = outputs.logits if takes_positions else outputs.logits[:, positions]
    if head is None:
        loss = cross_entropy_sum(logits.flatten(0, 1), targets.flatten(), all_labelled=all_labelled)
    else:
        loss = head_loss_sum(head, logits.flatten(0, 1), targets.flatten(), scale, all_labelled=all_labelled)
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None and torch.is_grad_enabled():
        loss = loss + base.config.get_text_config().router_aux_loss_coef * auxiliary * count
    return loss, count


def cross_entropy_sum(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
    overwrite: bool | None = None,
    all_labelled: bool = False,
) -> torch.Tensor:
    """Sum of ``-log softmax(logits)[target]`` over the rows that have a target, accumulated in fp32.

    The fp32 copy that this needs is never larger than a chunk of rows, and the gradient takes the place of the logits
    where nothing needs them any more. Same rounding as ``F.cross_entropy(logits.float(), targets, reduction="sum")``.

    Args:
        logits: ``[N, V]``, any float dtype.
        targets: ``[N]`` int64, -100 for none.
        chunk_bytes: of the fp32 scratch; by default what suits the device.
        overwrite: whether the backward pass may write the gradient over ``logits``; by default only where the operation
            that made them is known not to need them.
        all_labelled: that every row has a target; otherwise the device is waited for to learn which do.

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
    """Forward keeps one number per row, log Σ exp; backward makes the softmax again from it, chunk by chunk."""

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
        # detach shares the version counter: whoever still needed the logits gets an error, not a wrong gradient.
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
    """Whether the chain of views above ``logits`` ends in an operation that keeps no result."""
    node = logits.grad_fn
    while node is not None and node.name() in _KEEP_NO_RESULT:
        if not node.name().endswith(("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")):
            return True
        node = node.next_functions[0][0]
    return False


def _whole(model: nn.Module) -> nn.Module:
    """The model below what shares it among processes; accelerate's function for it visits each module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _base(model: nn.Module) -> Any:
    """The transformers model itself, below an adapter."""
    unwrap = getattr(model, "get_base_model", None)  # peft
    return unwrap() if unwrap is not None else model


@cache
def _takes_positions(kind: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(kind.forward).parameters
