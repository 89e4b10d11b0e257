"""What methods on pairs of a chosen and a rejected answer share."""

from __future__ import annotations

from torch import Tensor

from halftune.data.batch import WEIGHT, Batch
from halftune.data.store import Example
from halftune.methods import Loss, Method


class PairMethod(Method):
    """Mean loss over the pairs of the global batch; chosen and rejected answers go through one forward pass."""

    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def weight(self, example: Example) -> float:
        """A pair counts as one, however long its answers are."""
        return 1.0

    def total(self, batch: Batch, losses: Tensor, chosen: Tensor, rejected: Tensor) -> Loss:
        """The loss of a batch of N pairs.

        Args:
            batch: the pairs; those that only fill up a batch have weight 0.
            losses, chosen, rejected: loss of each pair, and the rewards of its answers, ``[N]``.
        """
        weight, margin = batch.columns[WEIGHT].to(losses.dtype), chosen - rejected
        measured = (chosen, rejected, margin, (margin > 0).to(losses.dtype))
        sums = [((weight * values.detach()).sum(), weight.sum()) for values in measured]
        return Loss((weight * losses).sum(), dict(zip(self.metrics, sums, strict=True)))


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the chosen and of the rejected answers ``[N]`` from those of all segments ``[2N]``."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected
