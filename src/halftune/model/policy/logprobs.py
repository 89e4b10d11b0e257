"""Log-probabilities of labels, without the logits of all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from halftune.model.policy.cross_entropy import cross_entropy_rows, scratch_rows
from halftune.model.policy.head import Head, HeadRows
from halftune_kernels.library import opaque
from halftune_kernels.ops.linear_cross_entropy import rows_at_a_time

_KEPT_BYTES = 64 << 20  # fp32 logits of a batch that are kept for the backward pass; more are computed again


def logprobs(own: HeadRows, temperature: float, chunk: int, *, entropies_of: int | None = None) -> torch.Tensor:
    """``log softmax(head(rows) / temperature)[target]`` of each row, in fp32 (fp64 for fp64).

    Behind a frozen head, the gradient of each row is computed with its value, from the same logits. Otherwise logits
    are kept where they are few, or computed again in the backward pass. On GPUs, a plain head's become their gradient
    in one pass.

    Args:
        own: N rows, N > 0.
        temperature: above 0.
        chunk: rows at a time.
        entropies_of: also the softmax's entropies: of this many likeliest tokens, see :func:`likeliest_entropy`, or 0:
            of all tokens.

    Returns:
        ``[1, N]``; with entropies, which have no graph, ``[2, N]``.
    """

    one_pass = opaque(own.rows) and temperature == 1.0 and entropies_of is None
    recorded = own.rows.requires_grad and torch.is_grad_enabled()
    overwrites = one_pass and own.plain and not _in_fp16(own.rows)

    def some(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = own.head(part)
        if one_pass and not torch.is_grad_enabled():
            return -_losses(logits, target, 1.0, wanted=False)[None]
        if overwrites:
            return _OnePass.apply(logits, target)[None]  # type: ignore[index]
        if temperature != 1.0:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        # one tensor of [chunk, V] at a time: where freed memory is kept, two leave holes that the next ones do not fit
        found = -cross_entropy_rows(logits, target, all_labelled=True)
        # the last thing: recomputing for the backward pass ends before it
        if entropies_of is None:
            return found[None]
        few = likeliest_entropy(logits.detach(), entropies_of) if entropies_of else _entropies(logits, target, found)
        return torch.stack([found, few])

    if own.frozen and recorded and not _in_fp16(own.rows):
        both = partial(_slopes_over_logits, own.head) if overwrites else partial(_slopes, some)
        return _WithSlopes.apply(own.rows, own.targets, both, chunk)  # type: ignore[return-value]
    if overwrites and not own.frozen:
        chunk = max(chunk, rows_at_a_time(own.vocabulary, own.rows.device, trained=True))
    parts = zip(own.rows.split(chunk), own.targets.split(chunk), strict=True)
    if 4 * len(own.rows) * own.vocabulary <= _KEPT_BYTES:
        return torch.cat([some(*part) for part in parts], dim=1)
    return torch.cat([checkpoint(some, *part, use_reentrant=False) for part in parts], dim=1)


def _losses(logits: torch.Tensor, targets: torch.Tensor, scale: float, *, wanted: bool) -> torch.Tensor:
    """Cross-entropy of each row in one pass; if ``wanted``, the logits become ``scale`` times its gradient."""
    from halftune_kernels.ops.linear_cross_entropy.operators import LOSSES  # for GPUs and graphs

    return LOSSES(logits, targets, scale, 0.0, wanted, None)


def _slopes(
    some: Callable[..., torch.Tensor], part: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and the derivative of their first row by ``part``."""
    with torch.enable_grad():
        inputs = part.detach().requires_grad_()
        values = some(inputs, target)
        (slopes,) = torch.autograd.grad(values[0].sum(), inputs)
    return values.detach(), slopes


def _slopes_over_logits(head: Head, part: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in one pass over the logits of a plain head, which become their gradient."""
    with torch.enable_grad():
        inputs = part.detach().requires_grad_()
        logits = head(inputs)
    gradient = logits.detach()
    values = -_losses(gradient, target, -1.0, wanted=True)
    (slopes,) = torch.autograd.grad(logits, inputs, gradient)
    return values[None], slopes


class _OnePass(torch.autograd.Function):
    """Log-probabilities of logits that nothing else needs: they become their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        return -_losses(logits, targets, 1.0, wanted=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets = ctx.saved_tensors
        _losses(logits, targets, -1.0, wanted=True)
        return logits.mul_(grad[:, None]), None


class _WithSlopes(torch.autograd.Function):
    """Values of rows, and with them their derivative by the row: one product less than computing the logits again."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, targets: torch.Tensor, both: Callable[..., Any], chunk: int
    ) -> torch.Tensor:
        slopes, found = torch.empty_like(rows), []
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            values, slopes[part] = both(rows[part], targets[part])
            found.append(values)
        ctx.save_for_backward(slopes)
        return torch.cat(found, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return (slopes * grad[0, :, None]).to(slopes.dtype), None, None, None


def _in_fp16(rows: torch.Tensor) -> bool:
    """Whether a head computes in fp16, where a gradient without the loss scale would underflow."""
    kind = rows.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return half or rows.dtype == torch.float16


@torch.no_grad()
def _entropies(logits: torch.Tensor, targets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Entropy of each row's softmax in nats ``[N]``, from the log-probabilities of its target ``[N]``."""
    found, rows = torch.empty_like(known), scratch_rows(logits)
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        log_sums = logits[part].gather(1, targets[part, None]).to(known.dtype) - known[part, None]
        logs = (logits[part].to(known.dtype) - log_sums).clamp_(min=-1000)  # 0 · log 0 is 0
        found[part] = -(logs.exp() * logs).sum(1)
    return found


def likeliest_entropy(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    """Entropy in nats of the ``tokens`` likeliest tokens, renormalised: fp32 ``[N]`` (fp64 for fp64) of ``[N, V]``."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    logs = logits.topk(min(tokens, logits.shape[-1])).values.log_softmax(-1, dtype=exact)
    return -(logs.exp() * logs).sum(-1)
