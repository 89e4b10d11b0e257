"""The metrics of the steps since the last line of ``metrics.jsonl``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from halftune.train.callback import Averages, StepMetrics
from halftune.train.state import TrainState


class Window:
    """Collects the steps of ``training.logging_steps`` and gives one line for them.

    Losses are averaged by weight and the method's metrics by their counts, so that the line says what one long step
    would have said; tokens and seconds are summed; the learning rate, the gradient norm and the extra numbers are those
    of the last step, but ``skipped`` updates, which are counted.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps: list[StepMetrics] = []

    def state(self) -> list[dict[str, Any]]:
        """The steps that no line has told of yet, JSON-able."""
        return [asdict(step) for step in self._steps]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Takes back what :meth:`state` gave."""
        # a checkpoint of an earlier version has no weight; then it was the number of trained tokens
        self._steps = [StepMetrics(**{"weight": step["tokens_trained"], **step}) for step in state]

    def add(self, run: TrainState, metrics: StepMetrics) -> dict[str, Any] | None:
        """Takes a step in; the line for ``metrics.jsonl`` where one is due, else None."""
        self._steps.append(metrics)
        due = run.step % self.every == 0 or run.step == run.total_steps
        return self.line(run) if due else None

    def line(self, run: TrainState) -> dict[str, Any] | None:
        """The line of all steps taken in since the last one, or None without any."""
        if not self._steps:
            return None
        steps, self._steps = self._steps, []
        # steps whose batch carries no label at all weigh nothing, unless there is no other
        weights = [step.weight for step in steps]
        weights = weights if any(weights) else [1.0] * len(steps)
        last, totals = steps[-1], ("tokens", "tokens_real", "tokens_trained", "seconds")
        sums = {name: sum(getattr(step, name) for step in steps) for name in totals}
        extra = {name: finite(value) for name, value in last.extra.items()}
        if "skipped" in extra:
            extra["skipped"] = sum(step.extra.get("skipped", 0.0) for step in steps)
        # a skipped step weighs nothing, and its loss may be no number
        losses = [step.loss * weight for step, weight in zip(steps, weights, strict=True) if weight]
        return {
            "step": run.step,
            "epoch": round(run.epoch, 6),
            "loss": finite(sum(losses) / sum(weights)),
            "learning_rate": last.learning_rate,
            "grad_norm": finite(last.grad_norm),
            **sums,
            "seconds": round(sums["seconds"], 6),
            "memory_bytes": last.memory_bytes,
            "time": round(time.time(), 3),
            **extra,
            **{name: finite(value) for name, value in ratios([step.averages for step in steps]).items()},
        }


def ratios(averages: Sequence[Averages]) -> dict[str, float]:
    """Metrics of several steps: all sums over all counts; NaN where nothing was counted."""
    found = {}
    for name in dict.fromkeys(name for one in averages for name in one):
        total, count = (sum(one[name][part] for one in averages if name in one) for part in (0, 1))
        found[name] = total / count if count else math.nan
    return found


def finite(value: float) -> float | None:
    """``value``, or None (JSON's null) where JSON has no word for it."""
    return value if math.isfinite(value) else None
