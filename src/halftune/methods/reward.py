"""Reward models (Bradley-Terry): the score of the chosen answer is to exceed that of the rejected one.

The loss of a pair with scores c and r is ``-log σ(c - r - m) + λ · (c + r)²``, with the pair's margin m (Touvron et al.
2023, arXiv:2307.09288) and the weight λ of centering (Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from halftune.config.sections.method import RewardMethod
from halftune.data.batch import Batch
from halftune.methods import Loss, Reference
from halftune.methods.pairs import PairMethod, split
from halftune.model.policy.policy import PolicyModel

MARGIN = "margin"


class Reward(PairMethod):
    """Mean of the losses of pairs of scores."""

    def __init__(self, section: RewardMethod) -> None:
        self.center = section.center_coefficient

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the pairs' losses; rewards are the scores."""
        chosen, rejected = split(policy.scores(batch))
        wanted = batch.columns.get(MARGIN, torch.zeros_like(chosen)).to(chosen.dtype)
        losses = -F.logsigmoid(chosen - rejected - wanted) + self.center * (chosen + rejected).square()
        return self.total(batch, losses, chosen, rejected)
