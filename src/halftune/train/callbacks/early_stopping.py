"""Stops after some evaluations without improvement."""

from __future__ import annotations

from halftune.train.callbacks.base import Callback, Run


class EarlyStopping(Callback):
    """Counts evaluations since the best one, from steps alone: nothing to save, and equal on every process.

    Args:
        patience: evaluations without improvement after which the run stops.
        every: ``training.eval_steps``.
    """

    def __init__(self, patience: int, every: int | str) -> None:
        self.patience, self.every = patience, every

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        """Sets ``run.stop`` when patience is over."""
        if run.best is None:
            return
        step, loss = run.best
        interval = run.steps_per_epoch if isinstance(self.every, str) else self.every
        since = round((run.step - step) / interval)
        if since >= self.patience:
            run.stop = f"no better evaluation loss than {loss:.4g} (step {step}) in {since} evaluations"
