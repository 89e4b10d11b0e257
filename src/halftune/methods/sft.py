"""Supervised fine-tuning: the cross-entropy of the labelled tokens of a conversation."""

from __future__ import annotations

from typing import ClassVar

from halftune.config.sections import Section
from halftune.data.batch import Batch
from halftune.data.store import Example
from halftune.methods import Loss, Reference
from halftune.model.policy import PolicyModel


class Sft:
    """Mean cross-entropy over the labelled tokens of the global batch."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, section: Section) -> None:
        """``train_on`` has chosen the labels when the data was prepared."""

    def weight(self, example: Example) -> float:
        """Labelled tokens that are predicted; the first one of a segment is predicted from nothing."""
        return float(sum(segment.loss_mask[1:].sum() for segment in example.segments))

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the cross-entropy."""
        return Loss(policy.nll_sum(batch))
