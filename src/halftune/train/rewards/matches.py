"""``matches``: a regular expression matches the whole answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.train.rewards import RewardFunction


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``."""
    return partial(matches, re.compile(section.pattern or "", re.DOTALL))


def matches(pattern: re.Pattern[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for an answer that the regular expression matches as a whole."""
    return [float(pattern.fullmatch(one.strip()) is not None) for one in completions]
