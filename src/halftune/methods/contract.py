"""What the training loop asks of a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from halftune.data.batch import Batch
from halftune.data.example import Example
from halftune.model.policy import PolicyModel


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch.

    Attributes:
        total: a scalar sum with a graph; the loop divides by the weight of the whole global batch.
        metrics: each of the method's metrics as (sum, count), scalars of the total's dtype without a graph; the loop
            sums both over micro-batches and processes and reports their ratio.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Method(Protocol):
    """A training method. Its section (``config.sections.method``) says which records it reads.

    Attributes:
        metrics: names of what it measures beside the loss.
    """

    metrics: ClassVar[tuple[str, ...]]

    def weight(self, example: Example) -> float:
        """The example's share of the normaliser: the loss of a global batch is the sum of totals over that of weights.

        A sum over any split of a batch is the same, so gradients do not depend on the split.
        """
        ...

    def loss(self, policy: PolicyModel, batch: Batch) -> Loss:
        """The loss of a batch on the model's device, under the plan's autocast."""
        ...
