"""Supervised fine-tuning: the cross-entropy of the labelled tokens of a conversation.

Dynamic fine-tuning (Wu et al. 2025, arXiv:2508.05629) multiplies the loss of a token by its probability; the factor has
no gradient.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from halftune.config.sections.method import Method as MethodSection
from halftune.config.sections.method import SftMethod
from halftune.data.batch import Batch
from halftune.data.store import Example
from halftune.methods import Loss, Reference
from halftune.model.policy import PolicyModel


class Sft:
    """Mean cross-entropy over the labelled tokens of the global batch."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, section: MethodSection) -> None:
        """``train_on`` has chosen the labels when the data was prepared."""
        self.dynamic = isinstance(section, SftMethod) and section.loss == "dft"

    def weight(self, example: Example) -> float:
        """Labelled tokens that are predicted; the first one of a segment is predicted from nothing."""
        return float(sum(segment.loss_mask[1:].sum() for segment in example.segments))

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the cross-entropy; while gradients are enabled, of what is asked for."""
        if self.dynamic and torch.is_grad_enabled():
            values = policy.token_logprobs(batch)
            return Loss(-(values.detach().exp() * values).sum())
        return Loss(policy.nll_sum(batch))
