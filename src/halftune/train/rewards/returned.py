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
# units in the last place that a function's own sums may round; narrower formats have one and none to spare
_UNITS = {torch.float64: 1024, torch.float32: 8}


def read_rewards(given: Any, count: int) -> tuple[list[float], float]:
    """Rewards of ``count`` answers, NaN for None; and the relative difference up to which two of them are equal.

    Raises:
        TypeError, ValueError: not a list of ``count`` numbers that are finite in fp32.
    """
    table = hasattr(given, "columns")  # iterating over a data frame gives its labels
    if table or isinstance(given, _NO_LIST) or not isinstance(given, Iterable):
        raise TypeError(f"expected a list of {count} numbers, got {type(given).__name__}")
    each = list(islice(given, count + 1))  # a generator, too, which may have no end
    if len(each) != count:
        raise ValueError(f"{'more' if len(each) > count else len(each)} values for {count} answers")
    found = [_read(one) for one in each]
    return [value for value, _ in found], _rounding(found)


def _rounding(found: list[tuple[float, torch.dtype | None]]) -> float:
    """Of the coarsest format among the values. Integers are exact in each format that has all integers of their size.

    fp32 numbers are fp64 after ``.tolist()`` and ``.item()``: fp64 values that are all exact in fp32 count as fp32.
    """
    each = [(value, dtype) for value, dtype in found if dtype is not None]
    if all(value.is_integer() and abs(value) * torch.finfo(dtype).eps <= 2 for value, dtype in each):
        return 0.0
    formats = {dtype for _, dtype in each}
    wide = torch.tensor([value for value, dtype in each if dtype == torch.float64], dtype=torch.float64)
    if len(wide) and wide.equal(wide.float().double()):
        formats = formats - {torch.float64} | {torch.float32}
    return max(torch.finfo(dtype).eps * _UNITS.get(dtype, 1) for dtype in formats)


def _read(given: Any) -> tuple[float, torch.dtype | None]:
    """The value and its format; no format for None and for what can only be an integer."""
    if given is None:
        return math.nan, None
    given = given.detach() if isinstance(given, torch.Tensor) else given
    name = str(getattr(given, "dtype", "")).removeprefix("torch.")
    if getattr(given, "shape", ()) == (1,):  # a row of a column, as models with one output give it
        given = given[0]
    readable = hasattr(given, "__float__") and not isinstance(given, str | bytes)  # numpy's texts have it
    if not readable or getattr(given, "shape", ()) != () or name.startswith("complex"):
        raise TypeError(f"expected a number or None, got {type(given).__name__}: {given!r:.80}")
    if not abs(value := float(given)) <= LARGEST:
        raise ValueError(f"expected a number that is finite in fp32 or None, got {value}")
    if isinstance(given, numbers.Integral) or name.startswith(("int", "uint", "bool")):
        return value, None
    dtype = getattr(torch, name, None)
    return value, dtype if isinstance(dtype, torch.dtype) else torch.float64
