"""Triton kernels in a trace: what they fill has its dtype and shape from the code that made it, and no numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_launches() -> Iterator[None]:
    """Inside, a launch of a Triton kernel does nothing, so that code around kernels runs where they cannot."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    launched = KernelInterface.__getitem__
    KernelInterface.__getitem__ = _skipped  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launched


def _skipped(_kernel: Any, _grid: Any) -> Callable[..., None]:
    return lambda *_args, **_options: None
