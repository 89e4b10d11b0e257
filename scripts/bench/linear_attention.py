"""Linear attention on the CPU: our operators against transformers' torch fallbacks, forward + backward, A/B in turn.

    OMP_NUM_THREADS=1 python scripts/bench/linear_attention.py
    OMP_NUM_THREADS=2 python scripts/bench/linear_attention.py --threads 2 --undisturbed

Head shapes are those of Qwen3.5 (K = V = 128, two value heads to a key head), Kimi-Linear, Bamba (heads of 64, state
128, one group) and RWKV-7, with fewer heads; RWKV-7, which transformers has not, against a loop over tokens in torch.
Medians of CPU-seconds with one thread, of wall time with more; each round runs every contender once. On a machine with
other work, threads that wait for each other measure that work: ``--undisturbed`` runs before all else (real-time
scheduling, which needs the right to it, and stops everything else meanwhile). Memory is the peak
of a process of its own above what it held before, forward + backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from halftune_kernels import gated_delta_rule, kda, mamba2_chunk_scan, rwkv7

LENGTHS = (512, 2048, 4096)
LONGEST = {"Kimi delta attention": 2048, "RWKV-7": 2048}  # beyond, the others take gigabytes
HEADS = {"gated delta rule": (4, 8), "Kimi delta attention": (2, 2), "Mamba-2": (1, 8), "RWKV-7": (2, 2)}
SIZES = {"gated delta rule": (128, 128), "Kimi delta attention": (128, 128), "Mamba-2": (128, 64), "RWKV-7": (64, 64)}
POSITIONAL = ("query", "key", "value")  # called q, k, v by some
Call = Callable[..., Any]
Inputs = dict[str, torch.Tensor]


def contenders(operator: str) -> dict[str, Call]:
    """transformers' undecorated fallback and our operator, both called as a model's layer does."""
    if operator == "RWKV-7":
        return {"others": functools.partial(rwkv7, backend="reference"), "halftune": rwkv7}
    if operator == "gated delta rule":
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as fallback

        ours: Call = gated_delta_rule
    elif operator == "Kimi delta attention":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as fallback

        ours = kda
    else:
        from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan as fallback

        ours = mamba2_chunk_scan
    undecorated: Call = fallback.__wrapped__  # type: ignore[attr-defined]
    how = {"chunk_size": 256, "dt_softplus": True} if operator == "Mamba-2" else {"use_qk_l2norm_in_kernel": True}
    return {"others": functools.partial(undecorated, **how), "halftune": functools.partial(ours, **how)}


def inputs(operator: str, length: int) -> tuple[Inputs, torch.Tensor]:
    """Fresh inputs that want gradients, by argument, and the gradient of the output."""
    (keys, values), (size, width) = HEADS[operator], SIZES[operator]
    by_key, by_value = (1, length, keys, size), (1, length, values, width)
    if operator == "Mamba-2":
        made = {"hidden_states": torch.randn(by_value), "dt": torch.randn(1, length, values), "A": -torch.rand(values)}
        made |= {"B": torch.randn(by_key), "C": torch.randn(by_key), "D": torch.randn(values)}
    elif operator == "RWKV-7":
        unit = F.normalize(torch.randn(by_key), dim=-1)
        made = {"r": torch.randn(by_key), "w": -0.6 * torch.rand(by_key), "k": torch.randn(by_key) * size**-0.5}
        made |= {"v": torch.randn(by_value), "a": -unit, "b": unit * torch.rand(by_key)}
    else:
        gate = (1, length, values) if operator == "gated delta rule" else (1, length, values, size)
        made = {"query": torch.randn(by_key), "key": torch.randn(by_key), "value": torch.randn(by_value)}
        made |= {"g": -torch.rand(gate), "beta": torch.rand(1, length, values)}
    return {name: x.requires_grad_() for name, x in made.items()}, torch.randn(by_value)


def once(function: Call, given: Inputs, gradient: torch.Tensor, clock: Call) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    for tensor in given.values():
        tensor.grad = None
    first = [given[name] for name in POSITIONAL if name in given]
    named = {name: x for name, x in given.items() if name not in POSITIONAL}
    start = clock()
    out = function(*first, **named)
    out = out[0] if isinstance(out, tuple) else out
    middle = clock()
    out.backward(gradient)
    return middle - start, clock() - middle


def measure(operator: str, length: int, rounds: int, clock: Call) -> dict[str, list[tuple[float, float]]]:
    given, gradient = inputs(operator, length)
    calls = contenders(operator)
    for function in calls.values():
        once(function, given, gradient, clock)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, function in calls.items():
            found[name].append(once(function, given, gradient, clock))
    return found


def peak(operator: str, length: int, name: str) -> float:
    """MiB above what the process held before; run in a process of its own."""
    given, gradient = inputs(operator, length)
    function = contenders(operator)[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of the imports
    before = status("VmRSS")
    once(function, given, gradient, time.perf_counter)
    return (status("VmHWM") - before) / 1024


def status(field: str) -> int:
    """KiB, from what Linux says about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def row(operator: str, length: int, rounds: int, threads: int) -> str:
    clock = time.process_time if threads == 1 else time.perf_counter
    found = measure(operator, length, rounds, clock)
    mid = {name: [statistics.median(run[i] for run in runs) * 1e3 for i in (0, 1)] for name, runs in found.items()}
    pairs = zip(found["others"], found["halftune"], strict=True)
    ratio = statistics.median(sum(theirs) / sum(ours) for theirs, ours in pairs)
    memory = {}
    for name in found:
        command = [sys.executable, __file__, "--peak", operator, str(length), name, "--threads", str(threads)]
        memory[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    cells = [f"{a:,.0f} / {b:,.0f}" for a, b in (mid["others"], mid["halftune"])]
    held = f"{memory['others']:,.0f} / {memory['halftune']:,.0f}"
    heads = f"{'/'.join(map(str, HEADS[operator]))} × {'/'.join(map(str, SIZES[operator]))}"
    return f"| {operator} | {heads} | {length:,} | {threads} | {cells[0]} | {cells[1]} | {ratio:.2f} | {held} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--operators", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--undisturbed", action="store_true", help="before everything else on the machine")
    parser.add_argument("--peak", nargs=3, metavar=("OPERATOR", "LENGTH", "CONTENDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads[0])
    if arguments.peak:
        print(json.dumps(peak(arguments.peak[0], int(arguments.peak[1]), arguments.peak[2])))
        return
    if arguments.undisturbed:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))  # before torch has threads: they inherit it
    print(
        "| operator | heads qk/v × K/V | T | threads | others, ms forward / backward | halftune | faster"
        " | peak MiB, others / halftune |\n|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for operator in arguments.operators:
            for length in (length for length in LENGTHS if length <= LONGEST.get(operator, length)):
                print(row(operator, length, arguments.rounds, threads), flush=True)


if __name__ == "__main__":
    main()
