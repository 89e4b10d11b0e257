"""Operators decide themselves what is computed in which dtype: autocast would round their sums to half on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def without_autocast(function: F) -> F:
    """``function`` with autocast off, on whichever device its first tensor is."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        first = next(tensors, None)
        if first is None or first.device.type == "meta" or not torch.is_autocast_enabled(first.device.type):
            return function(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]
