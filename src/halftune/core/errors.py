"""User-facing errors: each has a message, a place, a remedy and a code.

The command line prints ``str(error)`` without a traceback and exits with ``error.exit_code``. Any other exception is a
bug and shows its traceback. ``ProblemCollector`` reports several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T")


class ProblemCollector:
    """Collects problems of several decisions, to report them at once."""

    def __init__(self) -> None:
        self._problems: list[HalftuneError] = []

    def collect(self, decide: Callable[[], T]) -> T | None:
        """Return ``decide()``; on a :class:`PlanError`, keep its problems and return None."""
        try:
            return decide()
        except PlanError as error:
            self.add(error.problems)
            return None

    def add(self, problems: Iterable[HalftuneError]) -> None:
        """Add problems, each once."""
        known = set(map(str, self._problems))
        self._problems += [problem for problem in problems if str(problem) not in known]

    @property
    def error(self) -> PlanError | None:
        """Return one error with all problems; None without problems."""
        if len(self._problems) == 1 and isinstance(self._problems[0], PlanError):
            return self._problems[0]
        return PlanError(self._problems) if self._problems else None


class HalftuneError(Exception):
    """An error that the user can fix.

    Args:
        what: what is wrong, one sentence without a full stop.
        code: ``package.what_is_wrong``, a key of ``error_codes.yaml``; independent of the wording.
        where: the place, e.g. ``configs/x.yaml:14`` or ``data.jsonl line 7``.
        remedy: what to do about it.

    Attributes:
        problems: all problems found; this error alone by default.
    """

    exit_code = 1

    def __init__(self, what: str, *, code: str, where: str = "", remedy: str = "") -> None:
        self.what, self.code, self.where, self.remedy = what, code, where, remedy
        self.problems: tuple[HalftuneError, ...] = (self,)
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} · {self.remedy}" if self.remedy else head

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), vars(self)  # __init__ has more parameters than ``args``

    def report(self) -> str:
        """Return the text for the command line: ``str(error)`` with the code at the end of the first line."""
        first, newline, more = str(self).partition("\n")
        return f"{first} [{self.code}]{newline}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON data: ``kind, exit_code, code, problems``; each problem has ``code, what, where,
        remedy``."""
        listed = [
            {"code": each.code, "what": each.what, "where": each.where, "remedy": each.remedy} for each in self.problems
        ]
        return {"kind": type(self).__name__, "exit_code": self.exit_code, "code": self.code, "problems": listed}


class Problems(HalftuneError):
    """One or several problems, printed one per line; ``code`` is the first one's."""

    @overload
    def __init__(self, problems: str, *, code: str, where: str = "", remedy: str = "") -> None: ...
    @overload
    def __init__(self, problems: Sequence[HalftuneError]) -> None: ...
    def __init__(
        self, problems: Sequence[HalftuneError] | str, *, code: str = "", where: str = "", remedy: str = ""
    ) -> None:
        if isinstance(problems, str):
            if not code:
                raise TypeError("code is required")
            super().__init__(problems, code=code, where=where, remedy=remedy)
        else:
            super().__init__("; ".join(problem.what for problem in problems), code=problems[0].code)
            self.problems = tuple(problems)

    def __str__(self) -> str:
        if self.problems == (self,):
            return super().__str__()
        return "\n".join(str(problem) for problem in self.problems)

    def report(self) -> str:
        """Return :meth:`HalftuneError.report` of each problem, one per line."""
        if self.problems == (self,):
            return super().report()
        return "\n".join(problem.report() for problem in self.problems)


class ConfigError(Problems):
    """The configuration is invalid. Contains every problem found."""

    exit_code = 2


class DataError(HalftuneError):
    """A data file, row or column cannot be used for training."""

    exit_code = 2


class PlanError(Problems):
    """This machine or model does not support the configuration. Contains every reason found."""

    exit_code = 2


class DoesNotFitError(PlanError):
    """The memory estimate exceeds the device; `training.ignore_memory_estimate: true` runs it anyway."""

    exit_code = 1


class ModelError(HalftuneError):
    """A checkpoint, tokenizer or adapter cannot be loaded as planned."""

    exit_code = 3


class DtypeContractError(HalftuneError):
    """A tensor or weight does not have the planned dtype."""

    exit_code = 4


class TrainingError(HalftuneError):
    """Training cannot continue (non-finite loss, full disk …); files already written are intact."""

    exit_code = 5


class MissingPackageError(HalftuneError):
    """A required optional package is missing; the remedy is the command that installs it."""

    exit_code = 6
