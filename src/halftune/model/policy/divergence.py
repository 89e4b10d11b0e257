"""Divergence of a model's probabilities from a teacher's, without the logits of all positions at once.

p are the model's probabilities, q the teacher's, both at a temperature. The generalised Jensen-Shannon divergence
(Agarwal et al. 2023, arXiv:2306.13649, eq. 1) is ``β · KL(q ‖ m) + (1 - β) · KL(p ‖ m)`` with the mixture
``m = β · q + (1 - β) · p``; here, β = 0 is ``KL(q ‖ p)`` and β = 1 is ``KL(p ‖ q)``, as in TRL. With ``KL(p ‖ m)``'s
terms, the gradient with respect to the logits over the temperature is ``(1 - β) · p · (log p - log m - KL(p ‖ m))``;
of ``KL(q ‖ p)`` it is ``p - q``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halftune.model.policy.cross_entropy import cross_entropy_rows, scratch_rows
from halftune.model.policy.head import HeadRows


def divergences(own: HeadRows, teacher: HeadRows, beta: float, temperature: float, chunk: int) -> torch.Tensor:
    """Divergence and cross-entropy of each row: fp32 ``[2, N]`` (fp64 for an fp64 model).

    Logits are computed for a few rows at a time and recomputed in the backward pass. Of vocabularies that are padded to
    different sizes, the tokens of the smaller one count.

    Args:
        own: of the model in training.
        teacher: of the same labels.
        beta: from 0 to 1.
        temperature: above 0.
        chunk: rows at a time.
    """
    tokens = min(own.vocabulary, teacher.vocabulary)

    def some(rows: torch.Tensor, known: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = own.head(rows)
        with torch.no_grad():
            wanted = teacher.head(known)
        with torch.autocast(logits.device.type, enabled=False):
            found = _Divergence.apply(logits[:, :tokens], wanted[:, :tokens], beta, 1 / temperature)
        # the divergence reads the logits in its backward pass, so that this gradient may not overwrite them
        return torch.stack([found, cross_entropy_rows(logits, targets, overwrite=False, all_labelled=True)])

    parts = zip(own.rows.split(chunk), teacher.rows.split(chunk), own.targets.split(chunk), strict=True)
    return torch.cat([checkpoint(some, *part, use_reentrant=False) for part in parts], dim=1)


class _Divergence(torch.autograd.Function):
    """Saves the logits; backward recomputes the probabilities, a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, beta: float, factor: float) -> torch.Tensor:
        """``[N]`` from logits ``[N, V]`` of model and teacher, which are multiplied by ``factor``."""
        ctx.save_for_backward(logits, wanted)
        ctx.beta, ctx.factor, ctx.rows = beta, factor, scratch_rows(logits)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        found = torch.empty(len(logits), dtype=exact, device=logits.device)
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            own, known = _logs(logits[part], factor, exact), _logs(wanted[part], factor, exact)
            if beta == 0:
                found[part] = _kl(known, own)
            elif beta == 1:
                found[part] = _kl(own, known)
            else:
                mixed = _mixture(own, known, beta)
                found[part] = beta * _kl(known, mixed) + (1 - beta) * _kl(own, mixed)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, wanted = ctx.saved_tensors
        out, beta = torch.empty_like(logits), ctx.beta
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            own, known = _logs(logits[part], ctx.factor, grad.dtype), _logs(wanted[part], ctx.factor, grad.dtype)
            if beta == 0:
                one = own.exp_().sub_(known.exp_())
            else:
                one = own - (known if beta == 1 else _mixture(own, known, beta))
                chances = own.exp_()
                one = one.sub_((chances * one).sum(1, keepdim=True)).mul_(chances)
                one = one if beta == 1 else one.mul_(1 - beta)
            out[part] = one.mul_(grad[part, None] * ctx.factor).to(out.dtype)
        return out, None, None, None


def _logs(logits: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    return F.log_softmax(logits.to(dtype) * factor if factor != 1 else logits, dim=-1, dtype=dtype)


def _mixture(own: torch.Tensor, known: torch.Tensor, beta: float) -> torch.Tensor:
    """``log(β · q + (1 - β) · p)`` of logarithms."""
    return torch.logaddexp(own + math.log1p(-beta), known + math.log(beta))


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL divergence of each row from logarithms: the first from the second."""
    return (first.exp() * (first - second)).sum(1)
