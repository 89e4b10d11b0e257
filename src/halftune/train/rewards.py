"""Rewards of answers: functions that come with halftune, and functions in a file of the user's."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from halftune.config.sections.method import RewardFunctionSection
from halftune.core.errors import ConfigError, TrainingError

RewardFunction = Callable[..., Sequence[float | None]]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def last_number(text: str) -> float | None:
    """The last number of a text; after ``####``, as in GSM8K, if there is one."""
    found = _NUMBER.findall(text.rpartition("####")[2])
    return float(found[-1].replace(",", "")) if found else None


def exact_answer(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for an answer whose last number is that of the column ``answer``; for answers without a number: whose text is.

    Args:
        completions: the model's answers.
        answer: the column ``answer``, or the row's own answer.
    """
    rewards = []
    for completion, expected in zip(completions, map(str, answer), strict=True):
        number = last_number(expected)
        right = completion.strip() == expected.strip() if number is None else last_number(completion) == number
        rewards.append(float(right))
    return rewards


def matches(pattern: re.Pattern[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for an answer that the regular expression matches as a whole."""
    return [float(pattern.fullmatch(one.strip()) is not None) for one in completions]


def find_function(section: RewardFunctionSection) -> RewardFunction:
    """The function that a section names; loads its file.

    Raises:
        ConfigError: the file cannot be run, or has no such function.
    """
    if section.file is not None:
        return _from_file(section.file, section.function)
    if section.function == "exact_answer":
        return exact_answer
    return partial(matches, re.compile(section.pattern or "", re.DOTALL))


def _from_file(path: str, name: str) -> RewardFunction:
    try:
        spec = importlib.util.spec_from_file_location("rewards_of_the_recipe", path)
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, name)
    except Exception as error:
        what = f"{path}: {name}: {type(error).__name__}: {error}"
        remedy = "correct the file, or the function's name"
        raise ConfigError(what, where="method.rewards", remedy=remedy, code="config.bad_reward") from error
    return function


class Rewards:
    """All rewards of a run.

    Args:
        sections: ``method.rewards``.

    Raises:
        ConfigError: as ``find_function``.
    """

    def __init__(self, sections: Sequence[RewardFunctionSection]) -> None:
        self._sections = list(sections)
        self._functions = [find_function(one) for one in sections]

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Mapping[str, Any]], where: str
    ) -> torch.Tensor:
        """Rewards, without weights: fp32 ``[F, N]``; NaN where a function gives None.

        Args:
            prompts, completions: N texts each.
            rows: the rows of the prompts; their columns are passed by name.
            where: the rows' places, for errors.

        Raises:
            TrainingError: a function fails, or gives something else than N numbers.
        """
        names = sorted(set().union(*rows) - {"prompts", "completions"})
        columns = {name: [row.get(name) for row in rows] for name in names}
        found = []
        for section, function in zip(self._sections, self._functions, strict=True):
            try:
                given = function(prompts=list(prompts), completions=list(completions), **columns)
                values = [math.nan if one is None else float(one) for one in given]
                if len(values) != len(completions):
                    raise ValueError(f"{len(values)} values for {len(completions)} answers")
                if any(not math.isfinite(one) for one, told in zip(values, given, strict=True) if told is not None):
                    raise ValueError("a value is not finite")
            except Exception as error:
                what = f"reward function {section.function}: {type(error).__name__}: {error}"
                remedy = "a reward function takes prompts, completions and **columns, and returns a number for each"
                raise TrainingError(what, where=where, remedy=remedy, code="train.reward_failed") from error
            found.append(values)
        return torch.tensor(found, dtype=torch.float32)

    @property
    def weights(self) -> torch.Tensor:
        """fp32 ``[F]``."""
        return torch.tensor([one.weight for one in self._sections])
