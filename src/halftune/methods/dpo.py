"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), with the sigmoid loss.

The loss of a chosen answer c and a rejected one r is ``-log σ(β · [(log π(c) - log ρ(c)) - (log π(r) - log ρ(r))])``,
with the model in training π and the reference ρ, the model before training.
"""

from __future__ import annotations

from typing import ClassVar

from torch.nn import functional as F

from halftune.config.sections.method import DpoMethod
from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import Loss, Reference
from halftune.model.policy import PolicyModel


class Dpo:
    """Mean loss over the pairs of the global batch; chosen and rejected answers go through one forward pass."""

    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
    )

    def __init__(self, section: DpoMethod) -> None:
        self.beta = section.beta

    def weight(self, example: Example) -> float:
        """A pair counts as one, however long its answers are."""
        return 1.0

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses; rewards are ``β · (log π - log ρ)`` in nats."""
        known = reference.sequence_logprobs(batch)
        rewards = self.beta * (policy.sequence_logprobs(batch) - known)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        weight = batch.columns[WEIGHT].to(rewards.dtype)  # 0 for pairs that only fill up a batch
        margin = chosen - rejected
        measured = (chosen, rejected, margin, (margin > 0).to(rewards.dtype))
        sums = [((weight * values.detach()).sum(), weight.sum()) for values in measured]
        return Loss(-(weight * F.logsigmoid(margin)).sum(), dict(zip(self.metrics, sums, strict=True)))
