"""Skips Triton kernels in a trace: their outputs have dtype and shape, but no data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def skip_triton_kernels() -> Iterator[None]:
    """Inside, launches of Triton kernels do nothing, so that code around them runs without a GPU."""
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
