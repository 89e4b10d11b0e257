"""What a GPU reaches in practice, as constants: the only numbers that a prediction of speed rests on.

Data sheets give dense peaks with fp32 accumulation and the memory's bandwidth. Every row holds the share of them that
large operations reach. Those of Hopper were measured on an H200 by ``scripts/bench/gpu_rates.py`` (m), the others
were not. GPUs without tensor cores have no row. Sources, by letter:

a: data sheets of NVIDIA B200, H200, H100 (SXM), A100, A10, L4, V100 (SXM2), T4, GeForce RTX 5090, 4090, 3090 and 2080.
b: large cuBLAS products reach 70 to 90 % of the dense peak where power allows; cards of 150 W and less (A10, L4, T4)
   about half.
c: copies of large tensors reach 85 to 92 % of a data sheet's bandwidth.
d: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), figures 5 and 6, H100, head size 128, 8k tokens: forward FA3
   646 TFLOP/s, backward about 550.
e: Dao 2023, FlashAttention-2 (arXiv:2307.08691), figures 4 to 6, A100: up to 200 TFLOP/s forward and 190 backward.
f: assumed in proportion: attention to the products of a similar GPU, FA3 on Hopper to what FA2 reaches in a step,
   rounding to float8 and gated activations to the bandwidth.
g: assumed.
h: Hopper adds up float8 products in 14 bits, and without fast accumulation partial sums go to fp32 registers
   (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Other GPUs add up in fp32.
m: measured on three H200 with torch 2.11 in November 2026. Alone: bandwidth 4.28 TB/s, 2.76 where rows are rounded to
   float8; products of a 7B layer in bf16 695, tf32 351, fp32 52 and fp8 with scales of rows 1,355 TFLOP/s, 1,183
   without fast accumulation; memory-efficient attention 161 forward and 122 backward; the host takes 10 to 15 µs for an
   eager operator with autograd, 2.2 to 4.2 µs for one without a kernel, 5 to 11 µs for a read of the GPU (16 virtual
   cores). In a step of a 7B model, whose products hold the clock down: causal attention over samples of 4,096 with FA2
   245 and 220 TFLOP/s (302 and 259 alone), with FA4 495 and 424; gated activations between adapters 2.45 TB/s; products
   in bf16 732 on one GPU, 690 on another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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
        rounding: share of ``bandwidth`` that rounding rows to float8 reaches (m, f).
        gated: share of ``bandwidth`` that gated activations between adapters reach (m, f).
        exact: share of the products' rate in float8 without fast accumulation (h, m).
    """

    name: str
    pattern: str
    bandwidth: float
    gemm: dict[Work, float]
    attention: dict[str, tuple[float, float]]
    kernel: float = 2.5e-6
    scan: float = 1.0
    rounding: float = 0.64
    gated: float = 0.57
    exact: float = 1.0

    def products(self, work: Work) -> float:
        """FLOP/s of matrix products in a format; a GPU without units for it computes in the slowest that it has."""
        return self.gemm.get(work) or min(self.gemm.values())

    def seconds(self, *, moved: float, flops: float, rate: float, share: float = 1.0) -> float:
        """Time of one kernel: the longest of its traffic, its FLOPs at ``rate`` per second, and the shortest kernel.

        Args:
            moved: bytes, which ``share`` of the bandwidth moves.
            flops, rate: its FLOPs, and those of a second.
            share: of the bandwidth.
        """
        return max(moved / (share * self.bandwidth), flops / rate if flops else 0.0, self.kernel)


def _tera(**rates: float) -> dict[Work, float]:
    return {name: value * 1e12 for name, value in rates.items()}  # type: ignore[misc]


def _attention(**rates: tuple[float, float]) -> dict[str, tuple[float, float]]:
    return {name: (forward * 1e12, backward * 1e12) for name, (forward, backward) in rates.items()}


def _like(base: Roofline, name: str, pattern: str, *, bandwidth: float, scan: float, **products: float) -> Roofline:
    """A GPU whose attention is to its products in fp16 as that of ``base`` (f); bandwidth and products in tera."""
    rates = _tera(**products)
    share = rates["fp16"] / base.gemm["fp16"]
    attention = {kernel: (share * there, share * back) for kernel, (there, back) in base.attention.items()}
    return Roofline(name, pattern, bandwidth * 1e12, rates, attention, base.kernel, scan)


_HOPPER = _tera(bf16=690, fp16=690, tf32=350, fp32=50, fp8=1350)
_HOPPER_ATTENTION = _attention(fa2=(245, 220), fa3=(525, 460), fa4=(495, 425), flex=(220, 195), efficient=(160, 120))
_H200 = Roofline("H200", r"\bH200$", 4.3e12, _HOPPER, _HOPPER_ATTENTION, exact=0.87)
_A100 = Roofline(
    "A100",
    r"\bA100(-SXM4-| )80GB$",
    1.75e12,
    _tera(bf16=255, fp16=255, tf32=125, fp32=17),
    _attention(fa2=(195, 165), fa3=(195, 165), flex=(150, 110), efficient=(80, 55)),
    scan=1.6,
)
_RTX_4090 = Roofline(
    "RTX 4090",
    r"\bRTX 4090$",
    0.92e12,
    _tera(bf16=150, fp16=150, tf32=75, fp32=65, fp8=300),
    _attention(fa2=(140, 115), flex=(110, 80), efficient=(60, 45)),
    scan=1.4,
)
_T4 = Roofline("T4", r"\bT4$", 0.26e12, _tera(fp16=32, fp32=5), _attention(efficient=(16, 12)), kernel=3.5e-6, scan=8.0)
# Kernels of FlashAttention-2 are not written for Blackwell: as fast as on Hopper (g).
_B200_ATTENTION = {**_HOPPER_ATTENTION, **_attention(fa4=(1450, 1220))}
ROOFLINES: tuple[Roofline, ...] = (
    Roofline("B200", r"\bB200$", 7.0e12, _tera(bf16=1570, fp16=1570, tf32=790, fp32=55, fp8=3000), _B200_ATTENTION),
    _H200,
    replace(_H200, name="H100", pattern=r"\bH100( 80GB HBM3)?$", bandwidth=3.0e12),
    _A100,
    replace(_A100, name="A100 40GB", pattern=r"\bA100(-SXM4-| )40GB$", bandwidth=1.33e12),
    _like(_A100, "A10", r"\bA10$", bandwidth=0.53, scan=3.0, bf16=62, fp16=62, tf32=31, fp32=15),
    _like(_A100, "L4", r"\bL4$", bandwidth=0.26, scan=3.0, bf16=60, fp16=60, tf32=30, fp32=15, fp8=120),
    _like(_RTX_4090, "RTX 5090", r"\bRTX 5090$", bandwidth=1.6, scan=1.2,
          bf16=190, fp16=190, tf32=95, fp32=82, fp8=380),
    _RTX_4090,
    _like(_RTX_4090, "RTX 3090", r"\bRTX 3090$", bandwidth=0.84, scan=2.5, bf16=64, fp16=64, tf32=32, fp32=28),
    _like(_A100, "V100", r"\bV100(-SXM2-16GB|(-SXM2-| )32GB)?$", bandwidth=0.78, scan=3.0, fp16=94, fp32=13.5),
    _T4,
    _like(_T4, "RTX 2080", r"\bRTX 2080$", bandwidth=0.4, scan=6.0, fp16=36, fp32=8),
)  # fmt: skip


def roofline_of(device: str) -> Roofline | None:
    """Return the row of a device by the driver's name for it; None if there is none."""
    return next((row for row in ROOFLINES if re.search(row.pattern, device)), None)
