"""Numbers as people read them (losses, rates, bytes, durations), and the metrics of the steps since the last line."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from halftune.train.callbacks.base import Averages, StepMetrics
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


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def significant(value: float | None, digits: int = 4) -> str:
    """``value`` with so many significant digits, trailing zeros kept: 1.2 → ``1.200``; None and NaN as words."""
    if value is None:
        return "non-finite"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)  # after rounding: 9.9996 is 10.00
    if not -4 <= exponent < 6:
        return f"{mantissa}e{exponent}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def rate(value: float) -> str:
    """A learning rate: ``2.00e-4``."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(power)}" if value else "0"


def count(value: float) -> str:
    """A number of things or things per second, with thousands separators: ``12,345``."""
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """A big number in three digits: ``2.94 M``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{significant(value / limit, 3)} {unit}"
    return count(value)


def size(number: float) -> str:
    """Bytes in powers of 1,024, as the plan gives them: ``1.50 GiB``."""
    value, unit = float(number), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{significant(value, 3)} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds as ``340 ms``, ``8.2 s``, ``3 min 20 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return _two(whole, 60, "min", 1, "s")
    if whole < 86400:
        return _two(whole, 3600, "h", 60, "min")
    return _two(whole, 86400, "d", 3600, "h")


def _two(whole: int, big: int, big_name: str, small: int, small_name: str) -> str:
    rest = whole % big // small
    return f"{whole // big} {big_name}" + (f" {rest} {small_name}" if rest else "")


def clock(seconds: float) -> str:
    """Seconds as ``0:42``, ``3:20`` or ``2:05:00``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
