"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306) on answers rated good or bad.

With the reward ``r = β · (log π(y|x) - log ρ(y|x))`` of the model in training π and the reference ρ, and ``z`` the mean
of ``β · (log π(y'|x) - log ρ(y'|x))`` over the mismatched answers y' of a group, at least 0 and without a gradient, the
loss of a good answer is ``1 - σ(r - z)`` and that of a bad one is ``1 - σ(z - r)``. APO-zero unpaired (D'Oosterlinck et
al. 2024, arXiv:2408.06266) has ``z = 0``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halftune.config.sections.method import KtoMethod
from halftune.data.batch import WEIGHT, Batch, some_segments
from halftune.data.encode.groups import LABEL
from halftune.data.store import Example
from halftune.methods import Loss, Method, Reference
from halftune.model.policy.policy import PolicyModel


class Kto(Method):
    """Mean loss over the answers of the global batch.

    An example is a group of rows, so ``z`` does not depend on how a batch is split. In TRL it is the mean over a
    micro-batch and all processes; both are equal with one process and TRL's micro-batch as the group.
    """

    metrics = ("rewards/chosen", "rewards/rejected", "kl")

    def __init__(self, section: KtoMethod) -> None:
        self.beta, self.estimates = section.beta, section.loss == "kto"
        self.size = section.group_size if self.estimates else 1
        self.good, self.bad = section.desirable_weight, section.undesirable_weight

    def weight(self, example: Example) -> float:
        """The answers of the group."""
        return float(self.size)

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the answers' losses; rewards and KL in nats, the latter not multiplied by β."""
        known = reference.sequence_logprobs(batch)
        ratios = (self._logprobs(policy, batch) - known).view(-1, 2 if self.estimates else 1, self.size)
        rewards = self.beta * ratios[:, 0]  # [E, size]
        weight = (batch.columns[WEIGHT] > 0).to(rewards.dtype)[:, None]  # 0 for groups that only fill up a batch
        kl = ratios[:, -1].detach().mean(1, keepdim=True).clamp(min=0) if self.estimates else torch.zeros_like(weight)
        labels = torch.stack([batch.columns[LABEL.format(index)] for index in range(self.size)], 1).to(rewards.dtype)
        sign = 2 * labels - 1
        losses = (self.good * labels + self.bad * (1 - labels)) * torch.sigmoid(-sign * (rewards - self.beta * kl))
        measured = ((rewards, weight * labels), (rewards, weight * (1 - labels)), (kl, weight))
        sums = [_summed(values, counted) for values, counted in measured]
        return Loss((weight * losses).sum(), dict(zip(self.metrics, sums, strict=True)))

    def _logprobs(self, policy: PolicyModel, batch: Batch) -> Tensor:
        """Log-probabilities of all segments ``[S]``; those of mismatched answers need no gradient."""
        number = len(batch.segment_of_example)
        own = (torch.arange(number, device=batch.segment_of_example.device) // self.size) % 2 == 0
        answers, others = (some_segments(batch, kept) for kept in (own, ~own)) if self.estimates else (None, None)
        if answers is None or others is None:
            return policy.sequence_logprobs(batch)
        with torch.no_grad():
            mismatched = policy.sequence_logprobs(others)
        found = mismatched.new_zeros(number)
        return found.masked_scatter(~own, mismatched).masked_scatter(own, policy.sequence_logprobs(answers))


def _summed(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return (counted * values.detach()).sum(), counted.sum()
