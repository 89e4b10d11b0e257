"""Scores and their differences, with standard errors by the paired jackknife over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from halftune.evaluate.metrics import Score

FEWEST = 10  # rows for a standard error: of two rows from 0 to 1 it would be 0


@dataclass(frozen=True)
class Difference:
    """How a score differs from that of the first model.

    Attributes:
        value: of the difference.
        error: its standard error; None: not known.
    """

    value: float
    error: float | None

    @property
    def marked(self) -> bool:
        """Whether it is more than two standard errors."""
        return self.error is not None and abs(self.value) > 2 * self.error


def error(left_out: np.ndarray) -> float | None:
    """Standard error of a number, of which ``left_out`` ``[N]`` has the values without one row each.

    ``sqrt((N-1)/N · Σ (θ_i - mean θ)²)``: the jackknife (Tukey 1958; Efron and Stein 1981). Of a mean it is the usual
    standard error.

    Returns:
        None with fewer than ``FEWEST`` rows, or where a value is not finite.
    """
    count = len(left_out)
    if count < FEWEST or not np.isfinite(left_out).all():
        return None
    return math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))


def without_one(rows: np.ndarray, score: Score) -> np.ndarray:
    """The scores ``[N]`` without one row each, from the statistics of all rows ``[N, K]``."""
    total = rows.sum(axis=0)
    return np.array([score(total - one) for one in rows])


def difference(first: np.ndarray, other: np.ndarray, score: Score, *, paired: bool) -> Difference:
    """The score of ``other`` minus that of ``first``.

    Args:
        first, other: statistics of rows ``[N, K]``.
        score: from their sum.
        paired: whether both have the same rows; else there is no standard error.
    """
    value = score(other.sum(axis=0)) - score(first.sum(axis=0))
    if not paired or len(first) != len(other):
        return Difference(value, None)
    return Difference(value, error(without_one(other, score) - without_one(first, score)))
