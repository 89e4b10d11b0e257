"""Rewards of answers: functions that come with halftune, one file each, and functions in a file of the user's.

In: a prompt's row and answers.
Out: a number per answer.
Imported by: `train.rollouts`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.core import table
from halftune.core.errors import ConfigError, TrainingError
from halftune.core.processes import heartbeat
from halftune.methods.grpo import level
from halftune.train.rewards.returned import LARGEST, read_rewards

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
_BEAT = 5.0  # seconds

# name → make(its section, the method's section), which gives the function
REWARD_FUNCTIONS: dict[str, str] = {
    "exact_answer": "halftune.train.rewards.exact_answer:make",
    "matches": "halftune.train.rewards.matches:make",
    "same_maths": "halftune.train.rewards.same_maths:make",
    "passes_tests": "halftune.train.rewards.passes_tests:make",
    "overlong": "halftune.train.rewards.overlong:make",
}


def find_function(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """The function that a section names; loads its file.

    Raises:
        ConfigError: the file cannot be run, or has no such function.
        MissingPackageError: the function needs a package that is not installed.
    """
    if section.file is not None:
        return _from_file(section.file, section.function)
    return table.load(REWARD_FUNCTIONS, section.function, kind="reward function")(section, method)


def _from_file(path: str, name: str) -> RewardFunction:
    try:
        spec = importlib.util.spec_from_file_location(f"rewards_{zlib.crc32(path.encode()):08x}", path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # as an import does: dataclasses and pickle look a class's module up
        spec.loader.exec_module(module)
        function = getattr(module, name)
    except (Exception, SystemExit) as error:
        what = f"{path}: {name}: {type(error).__name__}: {error}"
        remedy = "correct the file, or the function's name"
        raise ConfigError(what, where="method.rewards", remedy=remedy, code="config.bad_reward") from error
    return function


def answer_text(value: Any) -> str:
    """A value of the column ``answer`` as text; "" where it is missing: None, or NaN as tables have it."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value).strip()


class Rewards:
    """All rewards of a run.

    Args:
        method: names the functions in ``rewards``.

    Raises:
        ConfigError, MissingPackageError: as ``find_function``.
    """

    def __init__(self, method: GrpoMethod) -> None:
        self._sections = list(method.rewards)
        self._functions = [find_function(one, method) for one in method.rewards]
        self._rounding = torch.zeros(len(self._sections), dtype=torch.float64)  # of the latest rewards, per function
        self._loop = asyncio.new_event_loop()  # one for all batches: clients of the user's functions belong to it
        weakref.finalize(self, self._loop.close)

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        ids: Sequence[Sequence[int]],
        rows: Sequence[Mapping[str, Any]],
        where: str,
    ) -> torch.Tensor:
        """Rewards, without weights: fp64 ``[F, N]``; NaN where a function gives None.

        Functions run one after the other; ``async`` ones then run at the same time.

        Args:
            prompts, completions: N texts each.
            ids: the completions' tokens.
            rows: the rows of the prompts; their columns are passed by name.
            where: the rows' places, for errors.

        Raises:
            TrainingError: a function fails, or gives something else than N numbers.
        """
        names = sorted(set().union(*rows) - {"prompts", "completions", "completion_ids"})
        given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        given |= {"prompts": list(prompts), "completions": list(completions), "completion_ids": list(ids)}
        found: list[Any] = []
        for section, function in zip(self._sections, self._functions, strict=True):
            heartbeat.beat()
            with _named(section, where), torch.set_grad_enabled(torch.is_grad_enabled()):  # a function may switch it
                found.append(function(**given))
        waiting = [index for index, one in enumerate(found) if inspect.isawaitable(one)]
        values = self._awaited([found[index] for index in waiting]) if waiting else []
        for index, value in zip(waiting, values, strict=True):
            found[index] = value
        read = [self._checked(*each, len(completions), where) for each in zip(self._sections, found, strict=True)]
        self._rounding = torch.tensor([rounding for _, rounding in read], dtype=torch.float64)
        return torch.tensor([values for values, _ in read], dtype=torch.float64)

    def _awaited(self, waiting: list[Awaitable[Any]]) -> list[Any]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(_all(waiting))
        with ThreadPoolExecutor(1) as pool:  # in a notebook, a loop runs in this thread already
            return pool.submit(self._loop.run_until_complete, _all(waiting)).result()

    @staticmethod
    def _checked(section: RewardFunctionSection, given: Any, count: int, where: str) -> tuple[list[float], float]:
        with _named(section, where):
            if isinstance(given, BaseException):
                raise given
            return read_rewards(given, count)

    @property
    def weights(self) -> torch.Tensor:
        """fp64 ``[F]``."""
        return torch.tensor([one.weight for one in self._sections], dtype=torch.float64)

    def total(self, rewards: torch.Tensor, group: int = 1) -> torch.Tensor:
        """The weighted sum ``[N]`` of the latest rewards ``[F, N]``; NaN where all with a weight are NaN, which counts
        nothing. In a group of answers, a function's rewards that are equal but for rounding become the same number,
        and then the sums.

        Raises:
            TrainingError: a sum is not finite in fp32.
        """
        weights, rounding = self.weights[:, None, None], self._rounding[:, None]
        each = rewards.view(len(rewards), -1, group)  # [F, E, G]
        each = level(each, rounding * each.nan_to_num().abs().amax(dim=2))
        unjudged = (each.isnan() | (weights == 0)).all(dim=0)
        parts = torch.where(each.isnan(), 0.0, each * weights)
        totals = torch.where(unjudged, torch.nan, parts.sum(dim=0))
        if not bool((unjudged | (totals.abs() <= LARGEST)).all()):
            what, remedy = "a weighted sum of rewards is not finite in fp32", "use smaller rewards or weights"
            raise TrainingError(what, where="method.rewards", remedy=remedy, code="train.reward_failed")
        rounding = rounding * (parts != parts[..., :1]).any(dim=2)  # what never varies is no difference
        rounding = rounding + len(parts) * torch.finfo(torch.float64).eps  # of this sum
        bound = (rounding * parts.abs().amax(dim=2)).sum(dim=0)
        return level(totals, bound).flatten()


async def _all(waiting: Iterable[Awaitable[Any]]) -> list[Any]:
    """What they give, or the exceptions that they raise; beats while they work."""
    tasks = [asyncio.ensure_future(_without_exit(one)) for one in waiting]
    left: set[Any] = set(tasks)
    while left:
        heartbeat.beat()
        _, left = await asyncio.wait(left, timeout=_BEAT)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _without_exit(waiting: Awaitable[Any]) -> Any:
    try:
        return await waiting
    except SystemExit as error:  # it would end the loop, and the run
        raise RuntimeError(f"exit({error.code})") from error


@contextmanager
def _named(section: RewardFunctionSection, where: str) -> Iterator[None]:
    """Raises what goes wrong inside as an error of this reward function."""
    try:
        yield
    except (Exception, SystemExit) as error:  # exit(0) would end training as if it were complete
        what = f"reward function {section.function}: {type(error).__name__}: {error}"
        remedy = "a reward function takes prompts, completions and **columns, and returns a list of numbers or None"
        raise TrainingError(what, where=where, remedy=remedy, code="train.reward_failed") from error
