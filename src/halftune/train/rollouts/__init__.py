"""Answers of the model in training, for methods that learn from them: one file per method, and one per sampler.

In: prompts of a batch, the model in training.
Out: a batch of its answers, with rewards.
Imported by: `train.setup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from halftune.core import table

if TYPE_CHECKING:
    from halftune.data.batch import Batch
    from halftune.train.batches.feed import Feed
    from halftune.train.state import TrainState


class Rollouts(Protocol):
    """Makes batches with answers from a step's batches."""

    def __call__(self, batches: list[Batch], feed: Feed) -> list[Batch]:
        """Batches of answers; those that only fill up a step stay as they are. All processes call it together.

        Args:
            batches: of this process; under a sharded model, every process has equally many.
            feed: that they are of.
        """
        ...


# type of the method's section → Rollouts(run)
ROLLOUTS: dict[str, str] = {
    "grpo": "halftune.train.rollouts.grpo:GrpoRollouts",
    "distill": "halftune.train.rollouts.distill:DistillRollouts",
}


def make_rollouts(run: TrainState) -> Rollouts:
    """What answers prompts in this run, for methods whose section says ``samples_answers``."""
    return table.load(ROLLOUTS, run.config.method.type, kind="method")(run)
