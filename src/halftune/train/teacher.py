"""The frozen model that another one learns from: whole on every device, with its own number formats and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.data.batch import Batch
from halftune.model.load.load import load_model
from halftune.model.policy.head import HeadRows
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan
from halftune.precision.dtypes import autocast


@dataclass(frozen=True)
class Teacher:
    """A frozen model that is asked in every step.

    Attributes:
        policy: the model.
        plan: its number formats.
        device: where it is computed.
    """

    policy: PolicyModel
    plan: Plan
    device: torch.device

    @torch.no_grad()
    def head_rows(self, batch: Batch) -> HeadRows:
        """The head's input at the labels; the head computes in the teacher's formats. See ``PolicyModel.head_rows``."""
        with autocast(self.plan.precision, self.device):
            found = self.policy.head_rows(batch)

        def head(rows: torch.Tensor) -> torch.Tensor:
            with autocast(self.plan.precision, self.device):
                return found.head(rows)

        return replace(found, head=head)

    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        """Sums of the labels' log-probabilities; see ``Reference``."""
        with torch.no_grad(), autocast(self.plan.precision, self.device):
            return self.policy.sequence_logprobs(batch)


def load_teacher(model: ModelSection, plan: Plan, device: torch.device) -> Teacher:
    """The teacher on a device.

    Args:
        model: the teacher.
        plan: its part of the run's plan.
        device: of this process.

    Raises:
        ModelError: it cannot be loaded.
    """
    loaded: Any = load_model(model, plan, for_training=False)
    return Teacher(PolicyModel(loaded.to(device)), plan, device)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, teacher: ModelSection) -> None:
    """Check that every token of the model in training has the same id in the teacher, which may know more tokens.

    Raises:
        ModelError: one has not; names the first.
    """
    known = load_tokenizer(teacher).get_vocab()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != index:
            raise ModelError(
                f"the vocabularies differ: {token!r} has id {index}, and in the teacher {known.get(token, 'none')}",
                where="method.teacher",
                remedy="use a teacher with the tokenizer of the trained model, such as a larger model of its family",
                code="model.other_vocabulary",
            )
