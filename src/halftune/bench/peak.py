"""Peak FLOP/s of a device in a number format: from its data sheet, or measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from halftune.core.choice import Format
from halftune.precision.dtypes import torch_dtype

# Dense TFLOP/s of the makers' data sheets, fp32 accumulation: (name, bf16 and fp16 on tensor cores, TF32, fp32).
# The first pattern that matches the device name applies.
_SHEETS: tuple[tuple[str, float | None, float | None, float], ...] = (
    (r"B200", 2250, 1125, 75),
    (r"H200|H100.*(SXM|HBM3$)|H100( 80GB HBM3)?$", 989, 495, 67),
    (r"H100.*PCIe", 756, 378, 51),
    (r"A100", 312, 156, 19.5),
    (r"A10G", 70, 35, 31.2),
    (r"A10\b", 125, 62.5, 31.2),
    (r"\bL40S", 362, 183, 91.6),
    (r"\bL4\b", 121, 60, 30.3),
    (r"V100.*PCIE", 112, None, 14),
    (r"V100", 125, None, 15.7),
    (r"\bT4\b", 65, None, 8.1),
    (r"RTX 2080$", 40.3, None, 10.1),
    (r"RTX 5090", 209.5, 104.8, 104.8),
    (r"RTX 4090", 165.2, 82.6, 82.6),
    (r"RTX 3090", 71, 35.6, 35.6),
    (r"MI355X", 2517, None, 157.3),
    (r"MI300X", 1307, 654, 163.4),
    (r"MI250", 181, None, 45.3),
)
_NO_BF16 = ("V100", "T4", "RTX 2080")  # tensor cores support fp16 only
_SIZE = {"cpu": 1024}  # size of the measured matmuls
_SIZE_ELSEWHERE = 8192
_MEASURE_SECONDS = 0.5


@dataclass(frozen=True)
class Peak:
    """FLOP/s, with the source of the number."""

    flops: float
    source: str


def peak_flops(device: torch.device, name: str, compute: Format, *, tf32: bool) -> Peak:
    """Return the peak for MFU.

    Args:
        device: used for measuring if no data sheet is known.
        name: the device's name.
        compute: the plan's compute format.
        tf32: whether fp32 products may use TF32.
    """
    listed = None if device.type == "cpu" else listed_peak(name, compute, tf32=tf32)
    return listed or measured(device, compute)


def listed_peak(name: str, compute: Format, *, tf32: bool) -> Peak | None:
    """Return a device's dense peak by its data sheet; None if there is none for this format."""
    if compute == "bf16" and any(word in name for word in _NO_BF16):
        return None
    for pattern, half, fast32, single in _SHEETS:
        value = half if compute != "fp32" else fast32 if tf32 else single
        if value and re.search(pattern, name):
            which = "TF32" if compute == "fp32" and tf32 else compute
            return Peak(value * 1e12, f"data sheet of {name}, dense {which}")
    return None


def measured(device: torch.device, compute: Format) -> Peak:
    """Measure the fastest square matmul within half a second, with torch's number of threads.

    On a CPU, CPU time divided by the threads is used, so that other processes do not matter.
    """
    size = _SIZE.get(device.type, _SIZE_ELSEWHERE)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    a, b = torch.randn(2, size, size, device=device).to(torch_dtype(compute))
    torch.mm(a, b)
    _wait(device)
    best, until = 0.0, clock() + _MEASURE_SECONDS * threads
    while clock() < until:
        began = clock()
        torch.mm(a, b)
        _wait(device)
        best = max(best, 2 * size**3 * threads / (clock() - began))
    words = f", {threads} thread(s)" if device.type == "cpu" else ""
    return Peak(best, f"measured: {compute} product of {size} × {size} matrices{words}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
