"""A decision with its reason (the leaves of plans), and the names of number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Format = Literal["bf16", "fp16", "fp32"]
StateFormat = Literal[Format, "8bit", "4bit"]
ASKED = "asked for"  # the reason of a choice that is the user's


T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision. ``reason``: one clause, lower case, without a full stop."""

    value: T
    reason: str
