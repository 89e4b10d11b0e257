"""Stops after some evaluations without improvement."""

from __future__ import annotations

from typing import Any

from halftune.train.callbacks.base import Callback
from halftune.train.state import TrainState


class EarlyStopping(Callback):
    """Counts evaluations since the best one; equal on every process, because they all know the same loss.

    Args:
        patience: evaluations without improvement after which the run stops.
    """

    def __init__(self, patience: int) -> None:
        self.patience, self.since = patience, 0

    def state(self) -> dict[str, Any]:
        """How many evaluations were not better."""
        return {"since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self.since = state["since"]

    def on_start(self, run: TrainState) -> None:
        """A run that had stopped stays stopped, unless patience is longer now."""
        self._look(run)

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Sets ``run.stop`` when patience is over."""
        better = run.best is not None and run.best[0] == run.step
        self.since = 0 if better else self.since + 1
        self._look(run)

    def _look(self, run: TrainState) -> None:
        if run.best is not None and self.since >= self.patience:
            step, loss = run.best
            metric = run.config.training.metric_for_best
            run.stop = f"no better {metric} than {loss:.4g} (step {step}) in {self.since} evaluations"
