"""Stops a run whose training loss stays high."""

from __future__ import annotations

from typing import Any

from halftune.train.callbacks.base import Callback, StepMetrics
from halftune.train.state import TrainState


class HighLoss(Callback):
    """Counts steps in a row whose loss is above a threshold; equal on every process, as the loss is.

    Args:
        above: the threshold.
        steps: how many such steps stop the run.
    """

    def __init__(self, above: float, steps: int) -> None:
        self.above, self.steps, self.since = above, steps, 0

    def state(self) -> dict[str, Any]:
        """How many steps in a row had a higher loss."""
        return {"since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self.since = state["since"]

    def on_start(self, run: TrainState) -> None:
        """A run that had stopped stays stopped, unless more steps are allowed now."""
        self._look(run)

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Sets ``run.stop`` after too many steps."""
        self.since = self.since + 1 if metrics.loss > self.above else 0
        self._look(run)

    def _look(self, run: TrainState) -> None:
        if self.since >= self.steps:
            run.stop = f"training loss above {self.above:.4g} for {self.since} steps"
