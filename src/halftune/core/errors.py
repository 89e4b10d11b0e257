"""One tree of user-facing errors: each says what is wrong, where, and what to do about it.

The command line prints ``str(error)`` without a traceback and leaves with ``error.exit_code``. Everything else that
escapes is a bug of ours and shows its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class HalftuneError(Exception):
    """Something the user can act on.

    Args:
        what: what is wrong, one sentence without a full stop.
        where: the place, e.g. ``configs/x.yaml:14`` or ``data.jsonl line 7``.
        remedy: what to do about it.

    Attributes:
        problems: everything that is wrong: more than this one where several were found at once.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        self.problems: tuple[HalftuneError, ...] = (self,)
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} · {self.remedy}" if self.remedy else head


class Problems(HalftuneError):
    """One problem, or several that were found at once, which are told one line each."""

    def __init__(self, problems: Sequence[HalftuneError] | str, *, where: str = "", remedy: str = "") -> None:
        if isinstance(problems, str):
            super().__init__(problems, where=where, remedy=remedy)
        else:
            super().__init__("; ".join(problem.what for problem in problems))
            self.problems = tuple(problems)

    def __str__(self) -> str:
        if self.problems == (self,):
            return super().__str__()
        return "\n".join(str(problem) for problem in self.problems)


class ConfigError(Problems):
    """The run's configuration is wrong; carries every problem found."""

    exit_code = 2


class DataError(HalftuneError):
    """A data file, row or column that cannot be trained on."""

    exit_code = 2


class PlanError(Problems):
    """The request is well-formed but this machine or model cannot honour it; carries every reason found."""

    exit_code = 2


class DoesNotFitError(PlanError):
    """The run is not expected to fit into memory; `training.ignore_memory_estimate: true` tries all the same."""

    exit_code = 1


class ModelError(HalftuneError):
    """A checkpoint, tokenizer or adapter that cannot be loaded as planned."""

    exit_code = 3


class DtypeContractError(HalftuneError):
    """A tensor or a weight does not have the dtype that the plan promised."""

    exit_code = 4


class TrainingError(HalftuneError):
    """Training cannot go on (a non-finite loss …), or a disk is full, whatever the verb; what was written is intact."""

    exit_code = 5


class MissingPackageError(HalftuneError):
    """An optional package is needed for what was asked; the remedy is the command that adds it."""

    exit_code = 6
