"""Times the Triton operators on the GPU that is here, forward and backward, beside fla's and beside softmax attention.

    python scripts/bench/kernels_gpu.py                      # prints; --out FOLDER also writes kernels_gpu.json there
    python scripts/bench/kernels_gpu.py --dry-run            # short rows on the CPU path: is the script right?

Milliseconds, medians, bf16, head size 128. Published times to compare with are of an H200. A setting that fails is
printed with its reason, and the next one goes on; leaves with 1 then.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from halftune_kernels import gated_delta_rule, kda, mamba2_chunk_scan, rwkv7, selfcheck

Run = Callable[[], torch.Tensor]
Times = tuple[float | None, float | None]  # forward, backward; None where it was not measured
Rows = dict[str, tuple[Run, Sequence[torch.Tensor]]]
# heads, value heads, lengths of the samples; published forward, backward of fla 0.5.1 and FlashQLA, H200, ms
DELTA: list[tuple[int, int, tuple[int, ...], dict[str, Times]]] = [
    (16, 32, (8192,), {"fla": (0.472, 1.444), "FlashQLA": (0.280, 0.789)}),
    (16, 32, (32768,), {"fla": (1.890, 5.697), "FlashQLA": (0.877, 2.515)}),
    (16, 32, (2048,) * 4, {"fla": (0.485, None), "FlashQLA": (0.167, None), "FlashInfer": (0.111, None)}),
    (16, 64, (8192,), {"fla": (0.814, None), "FlashQLA": (0.397, None)}),
    (4, 8, (8192,), {"fla": (None, 0.722), "FlashQLA": (None, 0.321)}),
]


class Bench:
    """Where the operators run, and what was measured so far."""

    def __init__(self, dry: bool, out: Path | None) -> None:
        self.device = torch.device("cpu" if dry else "cuda")
        self.backend, self.shrink = ("cpu", 128) if dry else ("triton", 1)
        self._out, self.failed = out, 0
        self.rows: list[dict[str, Any]] = []

    def randn(self, *shape: int) -> torch.Tensor:
        """A bf16 leaf."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_()

    def peer(self, module: str, name: str) -> Callable[..., Any] | None:
        """A function of a package that is not ours, where it is and can run."""
        if self.device.type == "cpu" or importlib.util.find_spec(module.partition(".")[0]) is None:
            return None
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, RuntimeError) as error:
            print(f"{module}: {error}", flush=True)
            return None

    def measure(self, name: str, rows: Rows, published: dict[str, Times] | None = None) -> None:
        """Prints and keeps forward and backward of every run; the first is ours."""
        found: dict[str, Times] = {}
        for who, (run, inputs) in rows.items():
            forward = backward = None
            try:
                forward = self._time(run, ())
                out = run()
                cotangent = torch.randn_like(out)
                backward = self._time(lambda: out.backward(cotangent, retain_graph=True), inputs)  # noqa: B023
            except (*selfcheck.failures(), ValueError, TypeError) as error:  # a peer refuses some GPU × Triton pairs
                self.failed += who == "halftune"
                print(f"{name}: {who}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            found[who] = (forward, backward)
        ours = found["halftune"]
        line = ", ".join(f"{who} {_text(times)}" for who, times in found.items())
        others = {who: times for who, times in (*found.items(), *(published or {}).items()) if who != "halftune"}
        ratios = {who: tuple(_ratio(a, b) for a, b in zip(times, ours, strict=True)) for who, times in others.items()}
        for who, times in (published or {}).items():
            line += f"; published {who} {_text(times)}"
        for who, both in ratios.items():
            line += f"; {who} takes {' / '.join('-' if x is None else f'{x:.2f}' for x in both)} times as long"
        print(f"{name}: {line}", flush=True)
        self.rows.append({"setting": name, "milliseconds": found, "published": published or {}, "ratios": ratios})
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            facts = {"torch": torch.__version__, "device": _name(self.device), "rows": self.rows}
            (self._out / "kernels_gpu.json").write_text(json.dumps(facts, indent=1))

    def _time(self, run: Callable[[], object], inputs: Sequence[torch.Tensor]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        from triton.testing import do_bench

        return float(do_bench(run, grad_to_none=list(inputs) or None, return_mode="median"))  # type: ignore[arg-type]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU, a dry run: times say nothing"


def _text(times: Times) -> str:
    return " / ".join("-" if x is None else f"{x:.3f}" for x in times)


def _ratio(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else theirs / ours


def delta(bench: Bench, heads: int, value_heads: int, lengths: tuple[int, ...], published: dict[str, Times]) -> None:
    """The gated delta rule beside fla's and beside causal softmax attention of as many heads."""
    lengths = tuple(max(1, length // bench.shrink) for length in lengths)
    total = sum(lengths)
    q, k, v = (bench.randn(1, total, count, 128) for count in (heads, heads, value_heads))
    g = (-F.softplus(torch.randn(1, total, value_heads, device=bench.device))).requires_grad_()
    beta = torch.rand(1, total, value_heads, device=bench.device).bfloat16().requires_grad_()
    bounds = torch.tensor([0, *lengths], device=bench.device).cumsum(0).int()
    inputs, options = (q, k, v, g, beta), {"use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    rows: Rows = {"halftune": (lambda: gated_delta_rule(*inputs, backend=bench.backend, **options)[0], inputs)}  # type: ignore[arg-type]
    if (theirs := bench.peer("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")) is not None:
        rows["fla here"] = (lambda: theirs(*inputs, **options)[0], inputs)
    if len(lengths) == 1:
        x, y, z = (bench.randn(1, value_heads, total, 128) for _ in range(3))
        rows["softmax attention here"] = (lambda: F.scaled_dot_product_attention(x, y, z, is_causal=True), (x, y, z))
    bench.measure(f"gated_delta_rule {heads}/{value_heads} heads, {lengths}", rows, published)


def scan(bench: Bench, length: int, heads: int) -> None:
    """Mamba-2's scan."""
    length = length // bench.shrink
    x, dt = bench.randn(1, length, heads, 64), bench.randn(1, length, heads)
    b, c = (bench.randn(1, length, 1, 128) for _ in range(2))
    a = -torch.rand(heads, device=bench.device)

    def run() -> torch.Tensor:
        return mamba2_chunk_scan(x, dt, a, b, c, dt_softplus=True, backend=bench.backend)  # type: ignore[return-value]

    rows: Rows = {"halftune": (run, (x, dt, b, c))}
    bench.measure(f"mamba2_chunk_scan {heads} heads of 64, state 128, {length} tokens", rows)


def by_channel(bench: Bench, operator: str, length: int, heads: int, size: int) -> None:
    """Kimi delta attention or RWKV-7."""
    shape = (1, length // bench.shrink, heads, size)
    q, k, v = (bench.randn(*shape) for _ in range(3))
    g = (-0.6 * torch.rand(shape, device=bench.device)).requires_grad_()
    rows: Rows = {}
    if operator == "kda":
        beta = torch.rand(shape[:3], device=bench.device).bfloat16().requires_grad_()
        inputs = (q, k, v, g, beta)
        rows["halftune"] = (lambda: kda(*inputs, use_qk_l2norm_in_kernel=True, backend=bench.backend)[0], inputs)
        if (theirs := bench.peer("fla.ops.kda", "chunk_kda")) is not None:
            rows["fla here"] = (lambda: theirs(*inputs, use_qk_l2norm_in_kernel=True)[0], inputs)
    else:
        unit = F.normalize(torch.randn(shape, device=bench.device), dim=-1)
        a, b = (-unit).bfloat16().requires_grad_(), (unit * torch.rand_like(unit)).bfloat16().requires_grad_()
        given = (q, g, k, v, a, b)
        rows["halftune"] = (lambda: rwkv7(*given, backend=bench.backend)[0], given)
        if (theirs := bench.peer("fla.ops.rwkv7", "chunk_rwkv7")) is not None:
            rows["fla here"] = (lambda: theirs(*given)[0], given)
    bench.measure(f"{operator} {heads} heads of {size}, {shape[1]} tokens", rows)


def main() -> int:
    """Every setting; 1 if one of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for kernels_gpu.json")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with short rows")
    asked = parser.parse_args()
    if not asked.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run runs the script on the CPU path", file=sys.stderr)
        return 2
    bench = Bench(asked.dry_run, asked.out)
    print(_name(bench.device), "torch", torch.__version__)
    for setting in DELTA:
        delta(bench, *setting)
    scan(bench, 8192, 64)
    by_channel(bench, "kda", 8192, 32, 128)
    by_channel(bench, "rwkv7", 8192, 32, 64)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
