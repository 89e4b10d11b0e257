"""``exact_answer``: the last number of an answer, or its text, is that of the column ``answer``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.train.rewards import RewardFunction, answer_text

# Commas stand before groups of three digits only: "2,3,5" are three numbers.
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS})(?:[eE][-+]?\d+)?", re.ASCII)
# What is left out: signs that group thousands, a currency behind a minus, and degrees.
_LEFT_OUT = re.compile(
    r"(?<=[\d,])(?:\\[,;:! ]|\{,\}|[_\u202f\u2009\xa0])(?=\d{3}(?!\d))|(?<=-)\\?[$€£¥](?=[\d.])|\^ ?\{? ?\\circ ?\}?"
)
_SIGNS = {r"\times": "×", r"\cdot": "×", "·": "×", r"\div": "/", "÷": "/", r"\pi": "π", "_{": "^{"}
_SIGNS |= {"\u2212": "-", "\u2013": "-"} | dict.fromkeys((r"\$", "$", "€", "£", "¥", r"\(", r"\)", r"\[", r"\]"), " ")
_SIGN = re.compile("|".join(map(re.escape, sorted(_SIGNS, reverse=True))))
_SUPERSCRIPTS, _RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+"), re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_TIMES_TEN_TO = re.compile(r"(?<=\d) ?[×*x] ?10 ?\^ ?(?:\{ ?([-+]?\d+) ?\}|([-+]?\d+))")
# Fractions and roots are written √ where an expression is looked for. One that does not end is all of the rest.
_BRACES = r"\{[^{}]*\}"
for _ in range(3):
    _BRACES = rf"\{{(?:[^{{}}]|{_BRACES})*\}}"
_PART = rf" ?(?:{_BRACES}|\w)"
_FRACTION = re.compile(rf"\\[dtc]?frac(?:{_PART}{_PART}|.*)|\\sqrt(?: ?\[[^\]]*\])?(?:{_PART}|.*)", re.DOTALL)
# An expression, which is a plain number or not, or a word with its exponent: digits behind a letter (H2O) or in an
# exponent (m^2) are no number. A minus behind a digit is no sign, and behind a letter it is a hyphen. What two letters
# divide by is a unit (5/day).
_SYMBOL = "[√π¼-¾⅐-⅞]"
_ATOM = rf"(?:(?:{_DIGITS})(?:\.\d+)*(?:[eE][-+]?\d+)?|{_SYMBOL})"
_OPERATOR = r"(?: ?[×/] ?|\*\*?|:|\+|x| [*+x] )[-+]?"
_POWER = r"[)}]? ?\^ ?[{(]?[-+]?\w*"
_EXPRESSION = re.compile(
    rf"[a-z_]\w*(?:{_POWER})?"
    rf"|((?:[/×] ?|(?<=[\w)}}])(?:\+| \+ ))?(?:(?<![\w)])(?<![\d√π] )[-+])?(?<![\w.^]){_ATOM}"
    rf"(?: ?{_SYMBOL}|(?<=√){_ATOM}|{_OPERATOR}{_ATOM}|{_POWER}|_\d+| ?/(?! ?[a-z]{{2}}))*)",
    re.ASCII | re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed ?\{(.*)\}", re.DOTALL)


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``."""
    return exact_answer


def _plain(text: str) -> str:
    """What follows ``####``, as in GSM8K, if anything does; signs of LaTeX and of Unicode are written one way."""
    text = re.sub(r"[ \t]+", " ", text.rstrip("# \t\r\n").rpartition("####")[2])
    text = _SIGN.sub(lambda found: _SIGNS[found.group()], _LEFT_OUT.sub("", text))
    text = _RAISED.sub(lambda found: "^" + found.group().translate(_SUPERSCRIPTS), text)
    return _FRACTION.sub("√", _TIMES_TEN_TO.sub(r"e\1\2", text)).strip()


def _decimal(text: str) -> Decimal | None:
    if _NUMBER.fullmatch(text) is None:
        return None
    try:
        return Decimal(text.replace(",", ""))
    except ArithmeticError:  # an exponent beyond those of decimals
        return None


def last_number(text: str) -> Decimal | None:
    """The last expression of a text, where it is a plain number and no fraction, power, root, product or sum."""
    found = [one for one in _EXPRESSION.findall(_plain(text)) if one]
    return _decimal(found[-1]) if found else None


def only_number(text: str) -> Decimal | None:
    r"""The number that a text is, that ``\boxed{}`` holds, or that stands alone after ``####``; else None."""
    given = _plain(text)
    boxed = _BOXED.fullmatch(given)
    return _decimal(boxed.group(1).strip() if boxed else given)


def exact_answer(completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 for an answer whose last number is that of the column ``answer``, or whose text is, where that is no number.

    Numbers are compared as decimals, with all their digits. An empty column judges nothing.

    Args:
        completions: the model's answers.
        answer: the column ``answer``, or the row's own answer.
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, map(answer_text, answer), strict=True):
        if not expected:
            rewards.append(None)
            continue
        number = only_number(expected)
        right = completion.strip() == expected if number is None else last_number(completion) == number
        rewards.append(float(right))
    return rewards
