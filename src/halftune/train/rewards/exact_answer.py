"""``exact_answer``: the last number of an answer, or its text, is that of the column ``answer``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.train.rewards import RewardFunction

# Commas stand before groups of three digits only: "2,3,5" are three numbers. A minus behind a letter or a digit is a
# hyphen, and digits behind a letter (H2O) or beside a slash (3/2) are no number.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"(?<![\w./])(?:(?<![\w)])[-+])?(?:{_DIGITS})(?:[eE][-+]?\d+)?(?![\d/])", re.ASCII)
_SPACES = re.compile(
    r"\\[,;:! ]|\{,\}|(?<=\d)[\u202f\u2009\xa0](?=\d{3})"
)  # between the thousands of LaTeX and of texts
# A fraction, a root or a power is no number that is written out, and the exponent of a unit (m^2) none at all.
_ROOT = re.compile(r"\\sqrt\s*(?:\{[^{}]*\}|\d)")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_TIMES_TEN_TO = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*(?:\{([-+]?\d+)\}|([-+]?\d+))")
_POWER = re.compile(r"\s*\^\s*(?:\{[^{}]*\}|[-+]?\d+)")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "$": " ", "€": " ", "£": " "})


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``."""
    return exact_answer


def _plain(text: str) -> str:
    """The text with LaTeX's separators left out, one kind of minus, and no signs of money."""
    thousands = _SPACES.sub(lambda found: "," if found.group() == "{,}" else "", text)
    written = _FRACTION.sub(r"\1/\2", _ROOT.sub("√", thousands)).replace("}/{", "/")
    written = _TIMES_TEN_TO.sub(r"e\1\2", written)
    written = _POWER.sub(lambda found: "/" if written[: found.start()][-1:].isdigit() else "", written)
    return written.replace("\\$", "$").translate(_MINUS)


def last_number(text: str) -> Decimal | None:
    """The last number of a text; after ``####``, as in GSM8K, if there is one."""
    found = _NUMBER.findall(_plain(text.rpartition("####")[2]))
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except ArithmeticError:  # an exponent beyond those of decimals
        return None


def only_number(text: str) -> Decimal | None:
    """The number that a text is, or that stands alone after ``####``; None for any other text."""
    given = _plain(text.rpartition("####")[2]).strip()
    return last_number(given) if _NUMBER.fullmatch(given) else None


def exact_answer(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 for an answer whose last number is that of the column ``answer``, or whose text is, where that is no number.

    Numbers are compared as decimals, with all their digits. An empty column judges nothing.

    Args:
        completions: the model's answers.
        answer: the column ``answer``, or the row's own answer.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        if expected is None or not str(expected).strip():
            rewards.append(None)
            continue
        number = only_number(str(expected))
        right = completion.strip() == str(expected).strip() if number is None else last_number(completion) == number
        rewards.append(float(right))
    return rewards
