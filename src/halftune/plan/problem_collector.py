"""Decisions that are tried one after the other, so that all that cannot be honoured is told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from halftune.core.errors import HalftuneError, PlanError

T = TypeVar("T")


class ProblemCollector:
    """What went wrong so far."""

    def __init__(self) -> None:
        self._problems: list[HalftuneError] = []

    def of(self, decide: Callable[[], T]) -> T | None:
        """What ``decide`` comes to; None where it cannot, which is kept."""
        try:
            return decide()
        except PlanError as error:
            self.add(error.problems)
            return None

    def add(self, problems: Iterable[HalftuneError]) -> None:
        """Keeps problems, each once."""
        known = set(map(str, self._problems))
        self._problems += [problem for problem in problems if str(problem) not in known]

    @property
    def failed(self) -> PlanError | None:
        """Everything that was kept; None where there is nothing."""
        if len(self._problems) == 1 and isinstance(self._problems[0], PlanError):
            return self._problems[0]
        return PlanError(self._problems) if self._problems else None
