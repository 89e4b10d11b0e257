"""Stops after some evaluations without improvement."""

from __future__ import annotations

from halftune.train.callback import Counter
from halftune.train.state import TrainState


class EarlyStopping(Counter):
    """Counts evaluations since the best one.

    Args:
        patience: evaluations without improvement after which the run stops.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Counts on, or from 0 after the best one."""
        better = run.best is not None and run.best[0] == run.step
        self.since = 0 if better else self.since + 1
        self.look(run)

    def look(self, run: TrainState) -> None:
        """Sets ``run.stop`` when patience is over."""
        if run.best is not None and self.since >= self.patience:
            step, loss = run.best
            metric = run.config.training.metric_for_best
            run.stop = f"no better {metric} than {loss:.4g} (step {step}) in {self.since} evaluations"
