"""Reward models (Bradley-Terry): the score of the chosen answer is to exceed that of the rejected one.

The loss of a pair with scores c and r is ``-log σ(c - r - m) + λ · (c + r)²``, with the pair's margin m (Touvron et al.
2023, arXiv:2307.09288) and the weight λ of centering (Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional as F

from halftune.config.sections.method import RewardMethod
from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import Loss, Reference
from halftune.model.policy import PolicyModel

MARGIN = "margin"


class Reward:
    """Mean loss over the pairs of the global batch; chosen and rejected answers go through one forward pass."""

    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
    )

    def __init__(self, section: RewardMethod) -> None:
        self.center = section.center_coefficient

    def weight(self, example: Example) -> float:
        """A pair counts as one, however long its answers are."""
        return 1.0

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses; rewards are the scores."""
        chosen, rejected = policy.scores(batch).view(-1, 2).unbind(1)
        weight = batch.columns[WEIGHT].to(chosen.dtype)  # 0 for pairs that only fill up a batch
        wanted = batch.columns.get(MARGIN, torch.zeros_like(weight)).to(chosen.dtype)
        margin = chosen - rejected
        losses = -F.logsigmoid(margin - wanted) + self.center * (chosen + rejected).square()
        measured = (chosen, rejected, margin, (margin > 0).to(chosen.dtype))
        sums = [((weight * values.detach()).sum(), weight.sum()) for values in measured]
        return Loss((weight * losses).sum(), dict(zip(self.metrics, sums, strict=True)))
