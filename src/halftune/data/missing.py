"""Missing values: null, NaN and infinities, as tables and lenient JSON write empty cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NOT_FINITE = "NaN or an infinity was read as a missing value"


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN or infinite."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def holds_missing(value: Any) -> bool:
    """Whether a nested value contains NaN or an infinity."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(holds_missing, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_missing, value))


def with_nulls(value: Any) -> Any:
    """A copy with NaN and infinities replaced by null."""
    if isinstance(value, Mapping):
        return {name: with_nulls(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(item) for item in value]
    return None if is_missing(value) else value
