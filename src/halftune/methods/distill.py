"""Knowledge distillation: the divergence of the model's probabilities from a teacher's, at the labelled tokens.

With β between 0 and 1 it is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, arXiv:2306.13649,
eq. 1), with 0 the forward and with 1 the reverse KL divergence.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halftune.config.sections.method import DistillMethod
from halftune.data.batch import Batch
from halftune.methods import Loss, Method
from halftune.model.policy.head import HeadRows
from halftune.model.policy.policy import PolicyModel

SAMPLED = "sampled"
"""Column of a batch: 1 for an example whose answer the model has sampled."""


class Teacher(Protocol):
    """A frozen model with the vocabulary of the model in training."""

    def head_rows(self, batch: Batch) -> HeadRows:
        """The head's input at the labels, without a graph; see ``PolicyModel.head_rows``."""
        ...


class Distill(Method):
    """Mean divergence over the labelled tokens of the global batch, and a share of their cross-entropy.

    The cross-entropy is learned from answers of the data only, also where the model samples some itself.
    """

    metrics = ("divergence", "cross_entropy")

    def __init__(self, section: DistillMethod) -> None:
        self.section = section

    def loss(self, policy: PolicyModel, batch: Batch, reference: Teacher) -> Loss:
        """``divergence_weight`` times the sum of the divergences plus ``sft_weight`` times that of the cross-entropy.

        The teacher runs first: its activations are gone before those of the model exist.
        """
        section = self.section
        teacher = reference.head_rows(batch)
        found = policy.divergences(batch, teacher, float(section.beta), float(section.temperature))
        divergence, cross_entropy = found.sum(dim=1)
        of_data = found[1] * self._from_data(policy, batch)
        learned = ((-found[1].detach()).exp() * of_data).sum() if section.sft_loss == "dft" else of_data.sum()
        total = section.divergence_weight * divergence + section.sft_weight * learned
        count = divergence.new_tensor(found.shape[1])
        sums = {"divergence": divergence, "cross_entropy": cross_entropy}
        return Loss(total, {name: (value.detach(), count) for name, value in sums.items()})

    @staticmethod
    def _from_data(policy: PolicyModel, batch: Batch) -> Tensor | float:
        """1 for each label ``[K]`` of an answer in the data; 0 for those of the model's own, which teach it nothing."""
        if SAMPLED not in batch.columns:
            return 1.0
        return 1 - batch.columns[SAMPLED][batch.segment_of_example[policy.label_segments(batch)]]
