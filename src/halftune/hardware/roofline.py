"""What a GPU reaches in practice, as constants: the only numbers that a prediction of speed rests on.

Data sheets give dense peaks with fp32 accumulation and the memory's bandwidth. Every row holds the share of them that
large operations reach. Those of Hopper were measured on an H200 by ``scripts/bench/gpu_rates.py`` (m), the others
were not. Sources, by letter:

a: data sheets of NVIDIA H200, H100 (SXM), A100 80GB, GeForce RTX 4090 and T4.
b: large cuBLAS products reach 70 to 90 % of the dense peak where power allows; a T4 (70 W) about half.
c: copies of large tensors reach 85 to 92 % of a data sheet's bandwidth.
d: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), figures 5 and 6, H100, head size 128, 8k tokens: forward FA3
   646 TFLOP/s, backward about 550.
e: Dao 2023, FlashAttention-2 (arXiv:2307.08691), figures 4 to 6, A100: up to 200 TFLOP/s forward and 190 backward.
f: assumed in proportion to the peak of the tensor cores.
g: assumed.
m: measured on an H200 with torch 2.11 in November 2026: bandwidth 4.28 TB/s; products of a 7B layer in bf16 691, tf32
   355, fp32 51 and fp8 with scales of rows 1,338 TFLOP/s; causal attention over samples of 4,096 with FA2 302 forward
   and 259 backward, memory-efficient 161 and 122; the host takes 10 to 15 µs for an eager operator with autograd, 3.5
   to 4.2 µs for one without a kernel, 8 to 11 µs for a read of the GPU (16 virtual cores).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Work = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]

HOST_LAUNCH = 10.0e-6
"""Seconds of host time per kernel launch of eager PyTorch, Python and autograd included (m)."""
HOST_CALL = 3.5e-6
"""Seconds of host time per operator that launches nothing, such as a view (m)."""
HOST_SYNC = 10.0e-6
"""Seconds from the end of the GPU's work to the host's next launch, after a host synchronisation (m)."""
SCANS: dict[str, tuple[float, float]] = {
    "scan_forward": (40e-9, 0.0),
    "scan_backward": (40e-9, 0.0),
    "solve": (0.0, 0.45e-9),
    "chunk_backward": (0.0, 2.9e-9),
}
"""Chunked linear attention on Hopper, seconds per token of a row, and per token and head (g): a scan goes through the
chunks of a row one after the other, 2.5 µs for 64 tokens; other kernels are bound by their small products."""


@dataclass(frozen=True)
class Roofline:
    """A GPU's attainable rates.

    Attributes:
        name: as users say it.
        pattern: regular expression of the driver's device names; not of parts (MIG) and variants (PCIe, NVL, laptops),
            which have other rates.
        bandwidth: bytes per second, read and written (a, c).
        gemm: FLOP/s of large matrix products by number format (a, b).
        attention: FLOP/s of fused causal attention, forward and backward, by kernel (d, e, f).
        kernel: seconds that the shortest kernel occupies the GPU, the gap to the next included.
        scan: time of a chunked linear-attention kernel over that on Hopper (``SCANS``).
    """

    name: str
    pattern: str
    bandwidth: float
    gemm: dict[Work, float]
    attention: dict[str, tuple[float, float]]
    kernel: float = 2.5e-6
    scan: float = 1.0

    def products(self, work: Work) -> float:
        """FLOP/s of matrix products in a format; a GPU without units for it computes in the slowest that it has."""
        return self.gemm.get(work) or min(self.gemm.values())

    def seconds(self, *, moved: float, flops: float, rate: float) -> float:
        """Time of one kernel: the longest of its traffic, its FLOPs at ``rate`` per second, and the shortest kernel."""
        return max(moved / self.bandwidth, flops / rate if flops else 0.0, self.kernel)


def _tera(**rates: float) -> dict[Work, float]:
    return {name: value * 1e12 for name, value in rates.items()}  # type: ignore[misc]


def _attention(**rates: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return {name: (forward * 1e12, backward * 1e12) for name, (forward, backward) in rates.items()}


_HOPPER = _tera(bf16=690, fp16=690, tf32=350, fp32=50, fp8=1330)
_HOPPER_ATTENTION = _attention(fa2=(300, 260), fa3=(640, 540), fa4=(640, 540), flex=(270, 230), efficient=(160, 120))
ROOFLINES: tuple[Roofline, ...] = (
    Roofline("H200", r"\bH200$", 4.3e12, _HOPPER, _HOPPER_ATTENTION),
    Roofline("H100", r"\bH100( 80GB HBM3)?$", 3.0e12, _HOPPER, _HOPPER_ATTENTION),
    Roofline(
        "A100",
        r"\bA100(-SXM4-| )(80|40)GB$",
        1.75e12,
        _tera(bf16=255, fp16=255, tf32=125, fp32=17),
        _attention(fa2=(195, 165), fa3=(195, 165), flex=(150, 110), efficient=(80, 55)),
        scan=1.6,
    ),
    Roofline(
        "RTX 4090",
        r"\bRTX 4090$",
        0.92e12,
        _tera(bf16=150, fp16=150, tf32=75, fp32=65, fp8=300),
        _attention(fa2=(140, 115), flex=(110, 80), efficient=(60, 45)),
        scan=1.4,
    ),
    Roofline(
        "T4",
        r"\bT4$",
        0.26e12,
        _tera(fp16=32, fp32=5),
        _attention(efficient=(16, 12)),
        kernel=3.5e-6,
        scan=8.0,
    ),
)


def roofline_of(device: str) -> Roofline | None:
    """Return the row of a device by the driver's name for it; None if there is none."""
    return next((row for row in ROOFLINES if re.search(row.pattern, device)), None)
