"""Memory of this process: its peak, and how the allocator treats what a step has freed."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use so far: allocated on a CUDA, ROCm or XPU device, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# glibc's names, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Lets this process keep the memory of freed tensors for the next ones, where its C library is glibc.

    By default glibc maps every large tensor anew and gives it back when it is freed: each step then faults in the same
    pages again, a tenth of the time of a small model on a CPU. Changes nothing about the largest amount in use.

    Returns:
        Whether the C library took it.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
