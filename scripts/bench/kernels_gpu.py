"""Times the Triton operators on the GPU that is here, forward and backward, beside fla's if it is installed.

    python scripts/bench/kernels_gpu.py

Milliseconds, medians, bf16, head size 128. Published times to compare with are of an H200.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import triton

from halftune_kernels import gated_delta_rule, kda, mamba2_chunk_scan, rwkv7

# heads, value heads, lengths of the samples; published forward / backward of fla 0.5.1 and FlashQLA, H200, ms
DELTA = [
    (16, 32, (8192,), "fla 0.472 / 1.444, FlashQLA 0.280 / 0.789"),
    (16, 32, (32768,), "fla 1.890 / 5.697, FlashQLA 0.877 / 2.515"),
    (16, 32, (2048,) * 4, "fla 0.485, FlashQLA 0.167, FlashInfer 0.111 (forward)"),
    (16, 64, (8192,), "fla 0.814, FlashQLA 0.397 (forward)"),
    (4, 8, (8192,), "fla 0.722, FlashQLA 0.321 (backward)"),
]


def times(run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Median milliseconds of the forward and of the backward pass."""
    out = run()
    cotangent = torch.randn_like(out)
    forward = triton.testing.do_bench(run, return_mode="median")
    backward = triton.testing.do_bench(
        lambda: out.backward(cotangent, retain_graph=True), grad_to_none=list(inputs), return_mode="median"
    )
    return forward, backward


def delta(heads: int, value_heads: int, lengths: tuple[int, ...], published: str) -> None:
    total, make = sum(lengths), {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(1, total, heads, 128, **make).requires_grad_() for _ in range(2))
    v = torch.randn(1, total, value_heads, 128, **make).requires_grad_()
    g = (-F.softplus(torch.randn(1, total, value_heads, device="cuda"))).requires_grad_()
    beta = torch.rand(1, total, value_heads, **make).requires_grad_()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    inputs = (q, k, v, g, beta)
    rows = {"halftune": times(lambda: gated_delta_rule(*inputs, backend="triton", **options)[0], inputs)}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        try:
            rows["fla here"] = times(lambda: chunk_gated_delta_rule(*inputs, **options)[0], inputs)
        except RuntimeError as error:  # it refuses some GPU × Triton pairs
            print(f"fla: {str(error).splitlines()[0]}")
    measured = ", ".join(f"{name} {forward:.3f} / {backward:.3f}" for name, (forward, backward) in rows.items())
    print(f"gated_delta_rule {heads}/{value_heads} heads, {lengths}: {measured}; published: {published}", flush=True)


def scan(length: int, heads: int) -> None:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(1, length, heads, 64, **make).requires_grad_()
    b, c = (torch.randn(1, length, 1, 128, **make).requires_grad_() for _ in range(2))
    dt = torch.randn(1, length, heads, **make).requires_grad_()
    a = -torch.rand(heads, device="cuda")
    inputs = (x, dt, b, c)
    run = times(lambda: mamba2_chunk_scan(x, dt, a, b, c, dt_softplus=True, backend="triton"), inputs)  # type: ignore[arg-type,return-value]
    print(f"mamba2_chunk_scan {heads} heads of 64, state 128, {length} tokens: {run[0]:.3f} / {run[1]:.3f}", flush=True)


def by_channel(operator: str, length: int, heads: int, size: int) -> None:
    """Kimi delta attention or RWKV-7."""
    shape = (1, length, heads, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    g = (-0.6 * torch.rand(shape, device="cuda")).requires_grad_()
    if operator == "kda":
        beta = torch.rand(shape[:3], device="cuda", dtype=torch.bfloat16).requires_grad_()
        inputs = (q, k, v, g, beta)
        run = times(lambda: kda(*inputs, use_qk_l2norm_in_kernel=True, backend="triton")[0], inputs)
    else:
        unit = F.normalize(torch.randn(shape, device="cuda"), dim=-1)
        a, b = (-unit).bfloat16().requires_grad_(), (unit * torch.rand_like(unit)).bfloat16().requires_grad_()
        inputs = (q, g, k, v, a, b)
        run = times(lambda: rwkv7(*inputs, backend="triton")[0], inputs)
    print(f"{operator} {heads} heads of {size}, {length} tokens: {run[0]:.3f} / {run[1]:.3f}", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for setting in DELTA:
        delta(*setting)
    scan(8192, 64)
    by_channel("kda", 8192, 32, 128)
    by_channel("rwkv7", 8192, 32, 64)
