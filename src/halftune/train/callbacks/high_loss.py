"""Stops a run whose training loss stays high."""

from __future__ import annotations

from halftune.train.callback import Counter, StepMetrics
from halftune.train.state import TrainState


class HighLoss(Counter):
    """Counts steps in a row whose loss is above a threshold.

    Args:
        above: the threshold.
        steps: how many such steps stop the run.
    """

    def __init__(self, above: float, steps: int) -> None:
        self.above, self.steps = above, steps

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Counts on, or from 0 below the threshold."""
        self.since = self.since + 1 if metrics.loss > self.above else 0
        self.look(run)

    def look(self, run: TrainState) -> None:
        """Sets ``run.stop`` after too many steps."""
        if self.since >= self.steps:
            run.stop = f"training loss above {self.above:.4g} for {self.since} steps"
