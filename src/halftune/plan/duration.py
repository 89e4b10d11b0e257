"""How long a run will take at the speed of an earlier one, or at a predicted speed; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from halftune.config.run import RunConfig
from halftune.core.files import json_objects
from halftune.plan.tree import Plan

_LAST_STEPS = 50  # the first steps of a run are slower than the rest


@dataclass(frozen=True)
class Pace:
    """The speed of a run.

    Attributes:
        tokens_per_second: fed tokens over all processes, median of the last steps.
        tokens_per_step: fed tokens, median.
        tokens_per_epoch: fed tokens of one pass over the data, or None if unknown.
    """

    tokens_per_second: float
    tokens_per_step: float
    tokens_per_epoch: float | None


def pace_of(lines: Sequence[str]) -> Pace | None:
    """The pace in the lines of a metrics.jsonl (broken lines are skipped); None where it has no training step."""
    steps = list(_training_steps(lines))
    if not steps:
        return None
    last = steps[-_LAST_STEPS:]
    per_step = statistics.median(entry["tokens"] for entry in last)
    reached, step = steps[-1].get("epoch"), steps[-1].get("step")
    per_epoch = per_step * step / reached if _is_positive(reached) and _is_positive(step) else None
    return Pace(statistics.median(entry["tokens"] / entry["seconds"] for entry in last), per_step, per_epoch)


def _training_steps(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for entry in json_objects(lines):
        if _is_positive(entry.get("seconds")) and _is_positive(entry.get("tokens")):
            yield entry


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def run_tokens(config: RunConfig, plan: Plan, pace: Pace) -> float | None:
    """Return the fed tokens of the whole run; None if its length is in epochs and those of an epoch are not known."""
    if (steps := config.training.max_steps) is not None:
        return steps * min(pace.tokens_per_step, plan.batch.tokens_per_step)
    return None if pace.tokens_per_epoch is None else pace.tokens_per_epoch * config.training.num_train_epochs


def duration(config: RunConfig, plan: Plan, pace: Pace, source: str = "in an earlier run here") -> str:
    """One line: how long the run will take at that pace, and where the pace is from."""
    speed = f"{pace.tokens_per_second:,.0f} tokens/s {source}"
    training = config.training
    tokens = run_tokens(config, plan, pace)
    if tokens is None:
        each = clock(1e6 / pace.tokens_per_second)
        return f"Time: {each} for a million tokens; those of an epoch are not known ({speed})."
    if training.max_steps is not None:
        length = f"{training.max_steps:,} steps"
    else:
        length = f"{training.num_train_epochs:g} epochs of {pace.tokens_per_epoch:,.0f} tokens"
    return f"Time: {clock(tokens / pace.tokens_per_second)} for {length} ({speed})."


def clock(seconds: float) -> str:
    """Seconds as a person says them: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
