"""``same_maths``: an answer is mathematically equal to the column ``answer``, by the package math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.core.optional import need
from halftune.train.rewards import RewardFunction, answer_text


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``.

    Raises:
        MissingPackageError: math-verify is not installed.
    """
    verify = need("math_verify", why="the reward same_maths", distribution="math-verify")

    def same_maths(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
        """1 for an equal expression, in LaTeX or not; None where the column ``answer`` is empty."""
        rewards: list[float | None] = []
        for completion, expected in zip(completions, map(answer_text, answer), strict=True):
            # x^2 is read between dollars only
            wanted = verify.parse(expected) or verify.parse(f"${expected}$") if expected else []
            rewards.append(float(verify.verify(wanted, verify.parse(completion))) if wanted else None)
        return rewards

    return same_maths
