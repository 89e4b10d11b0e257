"""Supervised fine-tuning: the cross-entropy of the labelled tokens of a conversation.

Dynamic fine-tuning (Wu et al. 2025, arXiv:2508.05629) multiplies the loss of a token by its probability.
Entropy-adaptive fine-tuning (Diao et al. 2026, arXiv:2601.02151) multiplies it by ``(H / scale) ** alpha``, with the
entropy H of the likeliest tokens, renormalised among themselves. The factors have no gradient.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from halftune.config.sections.method import Method as MethodSection
from halftune.config.sections.method import SftMethod
from halftune.data.batch import Batch
from halftune.data.store import Example
from halftune.methods import Loss, Reference
from halftune.model.policy.policy import PolicyModel


class Sft:
    """Mean cross-entropy over the labelled tokens of the global batch."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, section: MethodSection) -> None:
        """``train_on`` has chosen the labels when the data was prepared."""
        self.section = section if isinstance(section, SftMethod) else SftMethod()

    def weight(self, example: Example) -> float:
        """Labelled tokens that are predicted; the first one of a segment is predicted from nothing."""
        return float(sum(segment.loss_mask[1:].sum() for segment in example.segments))

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the cross-entropy; while gradients are enabled, of what is asked for."""
        section = self.section
        if section.loss == "nll" or not torch.is_grad_enabled():
            return Loss(policy.nll_sum(batch))
        if section.loss == "dft":
            values = policy.token_logprobs(batch)
            return Loss(-(values.detach().exp() * values).sum())
        values, entropies = policy.token_logprobs_and_entropies(batch, tokens=section.eaft_tokens)
        return Loss(-((entropies / section.eaft_scale) ** section.eaft_alpha * values).sum())
