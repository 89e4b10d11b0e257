"""Training methods, one file each: what an example weighs, and the loss of a batch.

``Method`` is what the training loop asks of them.

In: a `PolicyModel` and a `Batch`.
Out: a `Loss`: a sum with gradient, its weight, metrics.
Imported by: `bench`, `evaluate`, `train`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from halftune.config.sections.method import MethodSection
from halftune.core import table
from halftune.data.batch import Batch
from halftune.data.store import Example
from halftune.model.policy.policy import PolicyModel


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch.

    Attributes:
        total: a scalar sum with a graph; the loop divides by the weight of the whole global batch.
        metrics: each of the method's metrics as (sum, count), scalars of the total's dtype without a graph; the loop
            sums both over micro-batches and processes and reports their ratio.
        columns: what the later updates on the same batch read as further columns of it; without a graph.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)


class Reference(Protocol):
    """The model as it was before training."""

    def sequence_logprobs(self, batch: Batch) -> Tensor:
        """Sum of the labels' log-probabilities per segment in nats, without a graph: fp64 ``[S]`` (fp32 on MPS)."""
        ...


@dataclass(frozen=True)
class AdapterOff:
    """The reference below the adapter in training: one more forward pass for each call.

    Attributes:
        policy: the model in training, with an adapter.
    """

    policy: PolicyModel

    def sequence_logprobs(self, batch: Batch) -> Tensor:
        """The sums of the model without its adapter; see ``Reference``.

        Raises:
            PlanError: the model has no adapter.
        """
        with torch.no_grad(), self.policy.without_adapter():
            return self.policy.sequence_logprobs(batch)

    def token_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """The labels' log-probabilities ``[K]`` of the model without its adapter; see ``PolicyModel.token_logprobs``.

        Raises:
            PlanError: the model has no adapter.
        """
        with torch.no_grad(), self.policy.without_adapter():
            return self.policy.token_logprobs(batch, temperature)


class Method(ABC):
    """A training method. Its section (``config.sections.method``) says which records it reads.

    Attributes:
        metrics: names of what it measures beside the loss.
        updates: of the weights, on each batch of answers; 1 for methods on data.
    """

    metrics: tuple[str, ...] = ()
    updates: int = 1

    def weight(self, example: Example) -> float:
        """The example's share of the normaliser: the loss of a global batch is the sum of totals over that of weights.

        A sum over any split of a batch is the same, so gradients do not depend on the split. By default: labelled
        tokens that are predicted; the first one of a segment is predicted from nothing.
        """
        return float(sum(segment.loss_mask[1:].sum() for segment in example.segments))

    @abstractmethod
    def loss(self, policy: PolicyModel, batch: Batch, reference: Any) -> Loss:
        """The loss of a batch on the model's device, under the plan's autocast.

        Args:
            policy: the model in training.
            batch: whole examples.
            reference: what the plan compares with: a `Reference`, `AdapterOff` where the method asks for single
                tokens, or the teacher.
        """

    def evaluate(self, policy: PolicyModel, batch: Batch, reference: Any) -> Loss:
        """The loss that an evaluation reports, without a graph; by default that of training."""
        return self.loss(policy, batch, reference)


# type of the section → Method(section)
METHODS: dict[str, str] = {
    "sft": "halftune.methods.sft:Sft",
    "pretrain": "halftune.methods.pretrain:Pretrain",
    "dpo": "halftune.methods.dpo:Dpo",
    "kto": "halftune.methods.kto:Kto",
    "reward": "halftune.methods.reward:Reward",
    "simpo": "halftune.methods.reference_free:Simpo",
    "orpo": "halftune.methods.reference_free:Orpo",
    "cpo": "halftune.methods.reference_free:Cpo",
    "grpo": "halftune.methods.grpo:Grpo",
    "distill": "halftune.methods.distill:Distill",
}

__all__ = ["METHODS", "AdapterOff", "Loss", "Method", "Reference", "make_method"]


def make_method(section: MethodSection) -> Method:
    """The method that a ``method`` section asks for."""
    return table.load(METHODS, section.type, kind="method")(section)
