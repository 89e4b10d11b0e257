"""Peak memory of this process, as the operating system or the device counts it."""

from __future__ import annotations

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
