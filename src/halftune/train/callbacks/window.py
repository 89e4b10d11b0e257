"""The steps since the last line of metrics, as one line."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

from halftune.train.callbacks.base import Run, StepMetrics


class Window:
    """Collects the steps of ``training.logging_steps`` and gives one line for them.

    Losses are averaged over trained tokens, so that the line says what one long step would have said; tokens and
    seconds are summed; the learning rate, the gradient norm and the extra numbers are those of the last step, but
    ``skipped`` updates, which are counted.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps: list[StepMetrics] = []

    def state(self) -> list[dict[str, Any]]:
        """The steps that no line has told of yet, JSON-able."""
        return [asdict(step) for step in self._steps]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Takes back what :meth:`state` gave."""
        self._steps = [StepMetrics(**step) for step in state]

    def add(self, run: Run, metrics: StepMetrics) -> dict[str, Any] | None:
        """Takes a step in; the line for ``metrics.jsonl`` where one is due, else None."""
        self._steps.append(metrics)
        due = run.step % self.every == 0 or run.step == run.total_steps
        return self.line(run) if due else None

    def line(self, run: Run) -> dict[str, Any] | None:
        """The line of all steps taken in since the last one, or None without any."""
        if not self._steps:
            return None
        steps, self._steps = self._steps, []
        trained = sum(step.tokens_trained for step in steps)
        # steps whose batch carries no label at all weigh nothing, unless there is no other
        weights = [step.tokens_trained for step in steps] if trained else [1] * len(steps)
        last = steps[-1]
        extra = {name: finite(value) for name, value in last.extra.items()}
        if "skipped" in extra:
            extra["skipped"] = sum(step.extra.get("skipped", 0.0) for step in steps)
        # a skipped step weighs nothing, and its loss may be no number
        loss = sum(step.loss * weight for step, weight in zip(steps, weights, strict=True) if weight) / sum(weights)
        return {
            "step": run.step,
            "epoch": round(run.epoch, 6),
            "loss": finite(loss),
            "learning_rate": last.learning_rate,
            "grad_norm": finite(last.grad_norm),
            "tokens": sum(step.tokens for step in steps),
            "tokens_real": sum(step.tokens_real for step in steps),
            "tokens_trained": trained,
            "seconds": round(sum(step.seconds for step in steps), 6),
            "memory_bytes": last.memory_bytes,
            "time": round(time.time(), 3),
            **extra,
        }


def finite(value: float) -> float | None:
    """``value``, or None (JSON's null) where JSON has no word for it."""
    return value if math.isfinite(value) else None
