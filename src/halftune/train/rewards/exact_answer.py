"""``exact_answer``: the last number of an answer, or its text, is that of the column ``answer``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.train.rewards import RewardFunction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``."""
    return exact_answer


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
