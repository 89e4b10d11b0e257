"""What a reward function returns: a number for each answer, and how far equal ones of its numbers may be apart."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import torch

LARGEST = torch.finfo(torch.float32).max
_NO_LIST = (str, bytes, bytearray, Mapping, Set)  # they can be iterated, but not over rewards in the answers' order
# 1024, 8, 1 and 1 units in the last place: a function's own sums round often, a narrow format has none to spare
_ROUNDING = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_ROUNDING_FP64 = 2.0**-42


def read_rewards(given: Any, count: int) -> tuple[list[float], float]:
    """Rewards of ``count`` answers, NaN for None; and the relative difference up to which two of them are equal.

    The difference is that of the coarsest format among the values. Integers are exact.

    Raises:
        TypeError, ValueError: not a list of ``count`` numbers that are finite in fp32.
    """
    if isinstance(given, _NO_LIST) or not isinstance(given, Iterable):
        raise TypeError(f"expected a list of {count} numbers, got {type(given).__name__}")
    each = list(islice(given, count + 1))  # a generator, too, which may have no end
    if len(each) != count:
        raise ValueError(f"{'more' if len(each) > count else len(each)} values for {count} answers")
    found = [_read(one) for one in each]
    return [value for value, _ in found], max((rounding for _, rounding in found), default=0.0)


def _read(given: Any) -> tuple[float, float]:
    if given is None:
        return math.nan, 0.0
    given = given.detach() if isinstance(given, torch.Tensor) else given
    name = str(getattr(given, "dtype", "")).removeprefix("torch.")
    if getattr(given, "shape", ()) == (1,):  # a row of a column, as models with one output give it
        given = given[0]
    readable = hasattr(given, "__float__") and not isinstance(given, str | bytes)  # numpy's texts have it
    if not readable or getattr(given, "shape", ()) != () or name.startswith("complex"):
        raise TypeError(f"expected a number or None, got {type(given).__name__}: {given!r:.80}")
    if not abs(value := float(given)) <= LARGEST:
        raise ValueError(f"expected a number that is finite in fp32 or None, got {value}")
    exact = isinstance(given, numbers.Integral) or name.startswith(("int", "uint", "bool"))
    return value, 0.0 if exact else _ROUNDING.get(name, _ROUNDING_FP64)
