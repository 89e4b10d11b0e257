"""Limits that scores have to keep, for an exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halftune.core.errors import ConfigError
from halftune.core.quantities import significant
from halftune.core.table import did_you_mean
from halftune.evaluate.scores import Scores
from halftune.train.window import finite


@dataclass(frozen=True)
class Threshold:
    """A limit for every model but the bases.

    Attributes:
        metric: its name.
        limit: the limit.
        below: whether a score below it fails; else one above it.
    """

    metric: str
    limit: float
    below: bool

    def failed(self, value: float) -> bool:
        """Whether a score is beyond the limit; NaN always is."""
        return not (value >= self.limit if self.below else value <= self.limit)


def threshold(text: str, known: Sequence[str], tasks: Sequence[str], *, below: bool) -> Threshold:
    """Parse ``METRIC=VALUE``.

    Args:
        text: of the option.
        known: metrics that are measured.
        tasks: whose metrics (``task/metric``) are known once they have run.
        below: the option.

    Raises:
        ConfigError: it is not of this form, or the metric is not measured.
    """
    option = "--fail-below" if below else "--fail-above"
    name, _, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        what, remedy = f"expected METRIC=NUMBER, got {text!r}", f"write for example {option} loss=1.5"
        raise ConfigError(what, where=option, remedy=remedy, code="cli.bad_option_value") from None
    if name not in known and name.partition("/")[0] not in tasks:
        raise _unmeasured(name, option, known)
    return Threshold(name, limit, below)


def _unmeasured(name: str, option: str, known: Sequence[str]) -> ConfigError:
    remedy = f"add it to --metrics or --tasks; {did_you_mean(name, known)}"
    return ConfigError(f"{name!r} is not measured", where=option, remedy=remedy, code="evaluate.unknown_metric")


@dataclass(frozen=True)
class Verdict:
    """A threshold and a model's score.

    Attributes:
        threshold: the limit.
        model: the model's name.
        value: its score.
    """

    threshold: Threshold
    model: str
    value: float

    @property
    def failed(self) -> bool:
        """Whether the score is beyond the limit."""
        return self.threshold.failed(self.value)

    def describe(self) -> str:
        """One line."""
        limit = f"{self.threshold.metric} {'≥' if self.threshold.below else '≤'} {self.threshold.limit:g}"
        return f"{'failed' if self.failed else 'passed'}: {limit} for {self.model}: {significant(self.value)}"

    def as_json(self) -> dict[str, Any]:
        """The same, JSON-able."""
        return {
            **asdict(self.threshold),
            "model": self.model,
            "value": finite(self.value),
            "failed": self.failed,
        }


def verdicts(scores: Scores, thresholds: Sequence[Threshold]) -> list[Verdict]:
    """What the thresholds say of each model that is no base.

    Raises:
        ConfigError: a task has no such metric.
    """
    found = []
    for one in thresholds:
        if one.metric not in scores.cells:
            raise _unmeasured(one.metric, "--fail-below" if one.below else "--fail-above", list(scores.cells))
        for model, cell in zip(scores.models, scores.cells[one.metric], strict=True):
            if not model.is_base:
                found.append(Verdict(one, model.name, math.nan if cell is None else cell.value))
    return found
