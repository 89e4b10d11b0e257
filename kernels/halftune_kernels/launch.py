"""Launches Triton kernels; launches can be intercepted to compile ahead for any GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Starter = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of a kernel, fixed per GPU, without autotuning.

    Attributes:
        width: columns of the value (or channel) tile.
        warps: warps of a block.
        stages: depth of the software pipeline.
        depth: columns of the key tile, where keys are tiled.
    """

    width: int
    warps: int
    stages: int
    depth: int = 64


# Shipped choices of a kernel, the first that fits: largest padded key size, GPUs (capabilities; none for all), cut.
Rows = tuple[tuple[int, tuple[int, ...], Config], ...]
# Of the scans in fp32, where every operand is split in two: the least spilled for each column of values. At 256, on two
# GPUs, only narrow tiles keep ptxas from giving up and leaving nearly everything in memory.
SCAN_FP32: Rows = (
    (64, (), Config(16, 4, 1)),
    (128, (90,), Config(16, 4, 1)),
    (128, (), Config(16, 8, 1)),
    (256, (80, 100), Config(8, 4, 1)),
    (256, (), Config(16, 4, 1)),
)


@dataclass(frozen=True)
class _Stand:
    capability: int
    start: Starter


_stand: ContextVar[_Stand | None] = ContextVar("halftune_kernels_stand", default=None)


@contextlib.contextmanager
def standing_in(capability: int, start: Starter) -> Iterator[None]:
    """Inside, launches call ``start`` (kernel, grid, arguments, options) as if the GPU had ``capability``."""
    token = _stand.set(_Stand(capability, start))
    try:
        yield
    finally:
        _stand.reset(token)


def stands_in() -> bool:
    """Whether launches are intercepted, so that tensors may be on any device."""
    return _stand.get() is not None


def start(kernel: Any, grid: tuple[int, ...], config: Config, *args: Any, **constants: Any) -> None:
    """Launch ``kernel`` on ``grid`` with ``config``'s warps and stages; nothing for an empty grid."""
    if 0 in grid:
        return
    options = {**constants, "num_warps": config.warps, "num_stages": config.stages}
    with _compiled_safely(kernel, args):
        stand = _stand.get()
        if stand is not None:
            stand.start(kernel, grid, args, options)
        else:
            kernel[grid](*args, **options)


# Modules whose kernels form products one after the other, each from the last one's result.
_CHAINED = frozenset(
    f"halftune_kernels.{name}"
    for name in (
        "scan.delta_kernels",
        *(f"ops.{one}.kernels" for one in ("gated_delta_rule", "kda", "rwkv7", "ssd")),
        "ops.adapted_activation.triton",
    )
)
_SYNCHRONOUS = {90: "DISABLE_MMA_V3"}


@contextlib.contextmanager
def _compiled_safely(kernel: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """Inside, Triton compiles chained products to a warp's own instructions, not to asynchronous ones.

    Hopper's asynchronous products (wgmma), as Triton 3.6.0 compiles such chains, read shared memory beyond the kernel's
    own: results were off by 10 to 80 % or the process lost its GPU (H200, November 2026). All that were tried were
    right with the warp's own. The variable is part of the key of Triton's cache.
    """
    first = next((x for x in args if isinstance(x, torch.Tensor)), None)
    chained = first is not None and getattr(getattr(kernel, "fn", None), "__module__", "") in _CHAINED
    name = _SYNCHRONOUS.get(capability(first.device)) if chained and first is not None else None
    if name is None or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def capability(device: torch.device) -> int:
    """Return 10 * major + minor of ``device``, or of the intercepted GPU; 80 for the interpreter."""
    stand = _stand.get()
    if stand is not None:
        return stand.capability
    return _capability(device) if device.type == "cuda" else 80


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two(size: int, least: int = 16) -> int:
    """Return the smallest power of two ≥ ``size`` and ``least``, as tiles and dots require."""
    return max(least, 1 << (size - 1).bit_length())


def channels_together(x: torch.Tensor) -> torch.Tensor:
    """``x`` [rows, channels] with its channels side by side; rows may be apart, as in a slice of a wider tensor."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the input precision of dots in ``dtype``: three TF32 products for fp32, about 22 of 24 bits."""
    return "tf32x3" if dtype == torch.float32 else "ieee"
