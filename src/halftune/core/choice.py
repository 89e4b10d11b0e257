"""A decision together with its reason: the leaf of every plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """``value`` was decided because of ``reason`` (one clause, lower case, no full stop)."""

    value: T
    reason: str
