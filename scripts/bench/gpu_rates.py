"""The rates of this GPU that ``src/halftune/hardware/roofline.py`` holds as constants, measured in half a minute.

  python scripts/bench/gpu_rates.py              a table: what was measured, what the roofline says
  python scripts/bench/gpu_rates.py --out FILE   also as JSON

Random inputs, medians of events on the GPU's own clock. Products are those of a 7B layer at 8,192 tokens, attention is
causal with 28 query and 4 key heads of size 128 over samples of 4,096 tokens. Times of the host are those of eager
operators on tiny tensors. Attention is faster alone than within a step, whose rates the roofline holds: those come from
profiles (docs/measurements/gpu.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import head, row

from halftune.attention.flash_op import flash_varlen
from halftune.hardware.roofline import HOST_CALL, HOST_LAUNCH, HOST_SYNC, Roofline, roofline_of
from halftune_kernels.ops.float8_linear import quantised
from halftune_kernels.ops.float8_rows import quantise_rows

TOKENS, WIDTH, INNER = 8192, 3584, 18944
SAMPLE, QUERIES, KEYS, SIZE = 4096, 28, 4, 128


def seconds(call: Callable[[], object]) -> float:
    """Median of one call on the device."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=300, return_mode="median")) / 1e3  # type: ignore[arg-type]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def bandwidth() -> float:
    """Bytes per second of a copy of 4 GB, read and written."""
    source = torch.empty(2**31, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def products(dtype: torch.dtype) -> float:
    """FLOP/s of the two products of a feed-forward layer."""
    found = []
    for inner, outer in ((WIDTH, INNER), (INNER, WIDTH)):
        x, weight = drawn(TOKENS, inner, dtype=dtype), drawn(outer, inner, dtype=dtype)
        found.append(2 * TOKENS * inner * outer / seconds(lambda x=x, w=weight: x @ w.t()))
    return statistics.mean(found)


def float8() -> dict[str, float]:
    """FLOP/s of products in float8 with scales of rows, with fast accumulation and without; bytes per second of the
    rounding."""
    x, weight = drawn(TOKENS, WIDTH), quantised(drawn(INNER, WIDTH))
    rows, flops = quantise_rows(x), 2 * TOKENS * WIDTH * INNER
    multiply: Callable[..., torch.Tensor] = torch._scaled_mm  # type: ignore[reportPrivateImportUsage]
    given = {"scale_a": rows[1], "scale_b": weight.scales.t(), "out_dtype": torch.bfloat16}
    found = {}
    for name, fast in (("fp8", True), ("fp8 exact", False)):
        call = partial(multiply, rows[0], weight.values.t(), **given, use_fast_accum=fast)
        found[name] = flops / seconds(call)
    return found | {"rounding": 3 * x.numel() / seconds(lambda: quantise_rows(x))}


def attention(efficient: bool) -> tuple[float, float]:
    """FLOP/s of fused causal attention, forward and backward, the masked half not counted."""
    flops = 2 * TOKENS * SAMPLE * QUERIES * SIZE
    if efficient:
        shapes = [(TOKENS // SAMPLE, QUERIES, SAMPLE, SIZE)] * 3
    else:
        shapes = [(TOKENS, QUERIES, SIZE), *[(TOKENS, KEYS, SIZE)] * 2]
    q, k, v = (drawn(*shape).requires_grad_() for shape in shapes)
    bounds = torch.arange(0, TOKENS + 1, SAMPLE, device="cuda", dtype=torch.int32)

    def forward() -> torch.Tensor:
        if not efficient:
            return flash_varlen(q, k, v, bounds, bounds, SAMPLE, SAMPLE, None, -1, 0)[0]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    gradient = torch.randn_like(out)
    back = seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    return flops / seconds(forward), 2.5 * flops / back


def host() -> dict[str, float]:
    """Seconds: the shortest kernel, an eager launch, an operator without one, a read of the GPU after it is done."""
    x, many = torch.ones(8, device="cuda", requires_grad=True), 2000

    def per_call(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(many):
            call()
        taken = (time.perf_counter() - begun) / many
        torch.cuda.synchronize()
        return taken

    graph, y = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(many):
            y.add_(1)
    for call in (lambda: x * 2, lambda: x.view(2, 4)):
        per_call(call)  # warms up
    found = {"kernel": seconds(graph.replay) / many, "launch": per_call(lambda: x * 2)}
    found["call"] = per_call(lambda: x.view(2, 4))
    return found | {"sync": per_call(lambda: y.add_(1).sum().item()) - 2 * found["launch"]}


def measured() -> dict[str, float]:
    """Every rate by name, FLOP/s, bytes per second and seconds."""
    found = {"bandwidth": bandwidth(), "bf16": products(torch.bfloat16), "fp32": products(torch.float32)}
    torch.backends.cuda.matmul.allow_tf32 = True
    found["tf32"] = products(torch.float32)
    for name, efficient in (("fa2", False), ("efficient", True)):
        found[f"{name} forward"], found[f"{name} backward"] = attention(efficient)
    if torch.cuda.get_device_capability() >= (8, 9):
        found |= float8()
    return found | host()


def assumed(line: Roofline) -> dict[str, float]:
    """The roofline's constants by the names of `measured`."""
    known: dict[str, float] = {"bandwidth": line.bandwidth, "kernel": line.kernel, **line.gemm}
    known |= {"rounding": line.rounding * line.bandwidth, "fp8 exact": line.exact * line.gemm.get("fp8", 0.0)}
    for name, (forward, backward) in line.attention.items():
        known |= {f"{name} forward": forward, f"{name} backward": backward}
    return known | {"launch": HOST_LAUNCH, "call": HOST_CALL, "sync": HOST_SYNC}


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    device, found = torch.cuda.get_device_name(), measured()
    known = assumed(line) if (line := roofline_of(device)) else {}
    print(head(f"{device}, torch {torch.__version__}", "measured", "roofline", "ratio"))
    for name, value in found.items():
        scale, unit = (1e12, "T/s") if value > 1 else (1e-6, "µs")
        there = f"{known[name] / scale:.2f}" if name in known else "–"
        print(row(name, f"{value / scale:.2f} {unit}", there, f"{value / known[name]:.2f}" if name in known else "–"))
    if asked.out:
        asked.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rates": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
