"""The linear-attention operators, forward + backward, in turn with others' on the same inputs.

    python scripts/bench/operators.py                               one CPU thread: CPU-seconds, a Markdown table
    python scripts/bench/operators.py --threads 2 --undisturbed     wall time, before all else on the machine
    python scripts/bench/operators.py --gpu --out FOLDER            on the CUDA device; also FOLDER/operators.json
    python scripts/bench/operators.py --gpu --dry-run               the same settings, short, on the CPU path

The others are transformers' torch code on a CPU (RWKV-7: a loop over tokens) and fla on a GPU, where it is installed,
with softmax attention beside them. Head shapes on the CPU are those of Qwen3.5, Kimi-Linear, Bamba and RWKV-7, with
fewer heads. Threads that wait for each other measure what else the machine does: ``--undisturbed`` takes real-time
scheduling, which needs the right to it. Memory is the peak of a process of its own above what it held before. With
``--gpu`` the script leaves with 1 if one of ours failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import case, fresh, head, row

from halftune_kernels import gated_delta_rule, kda, mamba2_chunk_scan, rwkv7, selfcheck

Call = Callable[..., Any]
Inputs = dict[str, torch.Tensor]
Times = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Setting:
    """What is measured: an operator, heads of keys and of values, their sizes, tokens, published times on an H200."""

    operator: str
    heads: tuple[int, int]
    sizes: tuple[int, int]
    tokens: int
    published: str = ""

    def __str__(self) -> str:
        heads, sizes = ("/".join(map(str, pair)) for pair in (self.heads, self.sizes))
        return f"{self.operator} {heads} × {sizes}, {self.tokens:,} tokens"


DELTA, KDA, MAMBA, RWKV = "gated delta rule", "Kimi delta attention", "Mamba-2", "RWKV-7"
SHAPES = {DELTA: ((4, 8), (128, 128)), KDA: ((2, 2), (128, 128)), MAMBA: ((1, 8), (128, 64)), RWKV: ((2, 2), (64, 64))}
LENGTHS = {DELTA: (512, 2048, 4096), KDA: (512, 2048), MAMBA: (512, 2048, 4096), RWKV: (512, 2048)}
ON_CPU = [Setting(name, *SHAPES[name], length) for name, lengths in LENGTHS.items() for length in lengths]
ON_GPU = [
    Setting(DELTA, (16, 32), (128, 128), 8192, "fla 0.5.1 0.472 / 1.444, FlashQLA 0.280 / 0.789"),
    Setting(DELTA, (16, 32), (128, 128), 32768, "fla 0.5.1 1.890 / 5.697, FlashQLA 0.877 / 2.515"),
    Setting(DELTA, (16, 64), (128, 128), 8192, "fla 0.5.1 0.814, FlashQLA 0.397"),
    Setting(DELTA, (4, 8), (128, 128), 8192, "fla 0.5.1 backward 0.722, FlashQLA 0.321"),
    Setting(MAMBA, (1, 64), (128, 64), 8192),
    Setting(KDA, (32, 32), (128, 128), 8192),
    Setting(RWKV, (32, 32), (64, 64), 8192),
]
OURS: dict[str, Call] = {DELTA: gated_delta_rule, KDA: kda, MAMBA: mamba2_chunk_scan, RWKV: rwkv7}
OPTIONS: dict[str, dict[str, Any]] = {name: {"use_qk_l2norm_in_kernel": True} for name in (DELTA, KDA)}
OPTIONS |= {MAMBA: {"dt_softplus": True}, RWKV: {}}
FALLBACKS = {
    DELTA: ("transformers.models.qwen3_5.modeling_qwen3_5", "torch_chunk_gated_delta_rule"),
    KDA: ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    MAMBA: ("transformers.models.bamba.modeling_bamba", "mamba2_chunk_scan"),
}
FLA = {
    DELTA: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    KDA: ("fla.ops.kda", "chunk_kda"),
    RWKV: ("fla.ops.rwkv7", "chunk_rwkv7"),
}
BY_POSITION = ("query", "key", "value", "r", "w", "k", "v", "a", "b")  # others have other names for these
IN_FP32 = ("g", "w", "A", "D")


def contenders(setting: Setting, backend: str) -> dict[str, Call]:
    """Ours by ``backend``, and the others' that can run there; all are called as a model's layer does."""
    name, options = setting.operator, OPTIONS[setting.operator]
    found: dict[str, Call] = {"halftune": functools.partial(OURS[name], backend=backend, **options)}
    if backend == "triton":
        if name in FLA:
            try:
                module, function = FLA[name]
                found["fla"] = functools.partial(getattr(importlib.import_module(module), function), **options)
            except (ImportError, AttributeError, RuntimeError) as error:
                print(f"{FLA[name][0]}: {error}", flush=True)
    elif name in FALLBACKS:
        module, function = FALLBACKS[name]
        undecorated = getattr(importlib.import_module(module), function).__wrapped__
        more = {"chunk_size": 256} if name == MAMBA else {}
        found["others"] = functools.partial(undecorated, **options, **more)
    else:
        found["others"] = functools.partial(OURS[name], backend="reference")
    return found


def inputs(setting: Setting, device: str, dtype: torch.dtype) -> Inputs:
    """Fresh inputs that want gradients, by argument."""
    (keys, values), (size, width), length = setting.heads, setting.sizes, setting.tokens
    by_key, by_value = (1, length, keys, size), (1, length, values, width)
    if setting.operator == MAMBA:
        made = {"hidden_states": torch.randn(by_value), "dt": torch.randn(1, length, values), "A": -torch.rand(values)}
        made |= {"B": torch.randn(by_key), "C": torch.randn(by_key), "D": torch.randn(values)}
    elif setting.operator == RWKV:
        unit = F.normalize(torch.randn(by_key), dim=-1)
        made = {"r": torch.randn(by_key), "w": -0.6 * torch.rand(by_key), "k": torch.randn(by_key) * size**-0.5}
        made |= {"v": torch.randn(by_value), "a": -unit, "b": unit * torch.rand(by_key)}
    else:
        gate = (1, length, values) if setting.operator == DELTA else (1, length, values, size)
        made = {"query": torch.randn(by_key), "key": torch.randn(by_key), "value": torch.randn(by_value)}
        made |= {"g": -torch.rand(gate), "beta": torch.rand(1, length, values)}
    cast = {name: x.to(device, torch.float32 if name in IN_FP32 else dtype) for name, x in made.items()}
    return {name: x.requires_grad_() for name, x in cast.items()}


def forward(function: Call, given: Inputs) -> torch.Tensor:
    """The output alone."""
    first = [given[name] for name in BY_POSITION if name in given]
    out = function(*first, **{name: x for name, x in given.items() if name not in BY_POSITION})
    return out[0] if isinstance(out, tuple) else out


def once(function: Call, given: Inputs, clock: Callable[[], float]) -> Times:
    """Seconds of one forward and one backward."""
    for tensor in given.values():
        tensor.grad = None
    start = clock()
    out = forward(function, given)
    middle = clock()
    out.backward(torch.ones_like(out))
    return middle - start, clock() - middle


def on_gpu(function: Call, given: Inputs) -> Times:
    """Milliseconds on a CUDA device, medians."""
    from triton.testing import do_bench

    out = forward(function, given)
    gradient, leaves = torch.randn_like(out), list(given.values())
    first = do_bench(lambda: forward(function, given), return_mode="median")
    second = do_bench(lambda: out.backward(gradient, retain_graph=True), grad_to_none=leaves, return_mode="median")  # type: ignore[arg-type]
    return float(first), float(second)  # type: ignore[arg-type]


def peak(setting: Setting, name: str) -> float:
    """MiB above what this process held before."""
    given, function = inputs(setting, "cpu", torch.float32), contenders(setting, "cpu")[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of the imports
    before = _status("VmRSS")
    once(function, given, time.perf_counter)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def cpu_row(number: int, rounds: int, threads: int) -> str:
    """One setting on the CPU: medians, their ratio, memory."""
    setting, clock = ON_CPU[number], time.process_time if threads == 1 else time.perf_counter
    given, calls = inputs(setting, "cpu", torch.float32), contenders(setting, "cpu")
    found: dict[str, list[Times]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first one warms up
        for name, function in calls.items():
            found[name].append(once(function, given, clock))
    middle = {
        name: [1e3 * statistics.median(run[i] for run in runs[1:]) for i in (0, 1)] for name, runs in found.items()
    }
    pairs = zip(found["others"][1:], found["halftune"][1:], strict=True)
    faster = statistics.median(sum(theirs) / sum(ours) for theirs, ours in pairs)
    memory = " / ".join(f"{fresh(number, name, threads)['mib']:,.0f}" for name in ("others", "halftune"))
    times = [f"{a:,.0f} / {b:,.0f}" for a, b in (middle["others"], middle["halftune"])]
    heads, sizes = ("/".join(map(str, pair)) for pair in (setting.heads, setting.sizes))
    return row(setting.operator, f"{heads} × {sizes}", f"{setting.tokens:,}", threads, *times, f"{faster:.2f}", memory)


def gpu(dry: bool, out: Path | None) -> int:
    """Every setting on the device; 1 if one of ours failed."""
    if not dry and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run runs the settings on the CPU path", file=sys.stderr)
        return 2
    failed, rows = 0, []
    print("CPU, a dry run: times say nothing" if dry else torch.cuda.get_device_name(), "torch", torch.__version__)
    for setting in ON_GPU:
        setting = replace(setting, tokens=setting.tokens // 128) if dry else setting
        given = inputs(setting, "cpu" if dry else "cuda", torch.bfloat16)
        calls = contenders(setting, "cpu" if dry else "triton")
        if dry:
            calls.pop("others", None)
        elif setting.operator == DELTA:
            x = torch.randn(1, setting.heads[1], setting.tokens, 128, device="cuda", dtype=torch.bfloat16)
            calls["softmax attention"] = lambda *_, x=x, **__: F.scaled_dot_product_attention(x, x, x, is_causal=True)
            x.requires_grad_()
        times: dict[str, Times] = {}
        for name, function in calls.items():
            try:
                times[name] = once(function, given, time.perf_counter) if dry else on_gpu(function, given)
            except (*selfcheck.failures(), ValueError, TypeError) as error:  # a peer refuses some GPU × Triton pairs
                failed += name == "halftune"
                print(f"{setting}: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        shown = ", ".join(f"{name} {first:.3f} / {second:.3f}" for name, (first, second) in times.items())
        print(f"{setting}: {shown}" + (f"; published: {setting.published}" if setting.published else ""), flush=True)
        rows.append({"setting": str(setting), "milliseconds": times, "published": setting.published})
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "operators.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 1 if failed else 0


def main() -> int:
    """Prints the table."""
    torch.manual_seed(0)
    if (words := case()) is not None:
        torch.set_num_threads(int(words[2]))
        print(json.dumps({"mib": peak(ON_CPU[int(words[0])], words[1])}))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--operators", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--undisturbed", action="store_true", help="before everything else on the machine")
    parser.add_argument("--gpu", action="store_true", help="the settings for a CUDA device")
    parser.add_argument("--dry-run", action="store_true", help="with --gpu: short, on the CPU path")
    parser.add_argument("--out", type=Path, help="with --gpu: folder for operators.json")
    asked = parser.parse_args()
    if asked.gpu:
        return gpu(asked.dry_run, asked.out)
    if asked.undisturbed:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))  # before torch has threads: they inherit it
    columns = ("T", "threads", "others, ms forward / backward", "halftune", "faster", "peak MiB, others / halftune")
    print(head("operator", "heads qk/v × K/V", *columns))
    for threads in asked.threads:
        torch.set_num_threads(threads)
        for number, setting in enumerate(ON_CPU):
            if setting.operator in asked.operators:
                print(cpu_row(number, asked.rounds, threads), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
