"""``overlong``: a penalty for answers that come close to the longest length (DAPO, arXiv:2503.14476, eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.train.rewards import RewardFunction


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``."""
    return partial(overlong, method.max_completion_length, section.soft_tokens)


def overlong(longest: int, soft: int, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """0 up to ``longest - soft`` tokens, then falls to -1 at ``longest`` tokens."""
    return [-min(1.0, max(0.0, (len(ids) - longest + soft) / soft)) for ids in completion_ids]
