"""Disables autocast inside operators, and selects the GPU of their tensors.

Autocast would round their sums to half on the way; Triton starts a kernel on the current GPU, wherever its tensors are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def without_autocast(function: F) -> F:
    """Wrap ``function`` to run without autocast and, on CUDA, with its first tensor's GPU as the current device."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        first = next(tensors, None)
        if first is None or first.device.type == "meta":
            return function(*args, **kwargs)
        with ExitStack() as inside:
            if first.device.type == "cuda":
                inside.enter_context(torch.cuda.device(first.device))
            if torch.is_autocast_enabled(first.device.type):
                inside.enter_context(torch.autocast(first.device.type, enabled=False))
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]
