"""A decision with its reason: the leaves of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decision. ``reason``: one clause, lower case, without a full stop."""

    value: T
    reason: str
