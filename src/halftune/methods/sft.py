"""Supervised fine-tuning: the cross-entropy of the labelled tokens of a conversation.

Dynamic fine-tuning (Wu et al. 2025, arXiv:2508.05629) multiplies the loss of a token by its probability.
Entropy-adaptive fine-tuning (Diao et al. 2026, arXiv:2601.02151) multiplies it by ``(H / scale) ** alpha``, with the
entropy H of the likeliest tokens, renormalised among themselves. The factors have no gradient.
"""

from __future__ import annotations

from halftune.config.sections.method import MethodSection, SftMethod
from halftune.data.batch import Batch
from halftune.methods import Loss, Method, Reference
from halftune.model.policy.policy import PolicyModel


class Sft(Method):
    """Mean cross-entropy over the labelled tokens of the global batch."""

    def __init__(self, section: MethodSection) -> None:
        """``train_on`` has chosen the labels when the data was prepared."""
        self.section = section if isinstance(section, SftMethod) else SftMethod()

    def loss(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum over the labelled tokens of the loss that is asked for."""
        section = self.section
        if section.loss == "nll":
            return Loss(policy.nll_sum(batch))
        if section.loss == "dft":
            values = policy.token_logprobs(batch)
            return Loss(-(values.detach().exp() * values).sum())
        values, entropies = policy.token_logprobs_and_entropies(batch, tokens=section.eaft_tokens)
        return Loss(-((entropies / section.eaft_scale) ** section.eaft_alpha * values).sum())

    def evaluate(self, policy: PolicyModel, batch: Batch, reference: Reference) -> Loss:
        """Sum of the plain cross-entropy, which other runs report, too."""
        return Loss(policy.nll_sum(batch))
