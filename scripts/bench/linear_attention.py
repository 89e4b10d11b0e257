"""Linear attention on the CPU: our operators against transformers' torch fallbacks, forward + backward, A/B in turn.

    OMP_NUM_THREADS=1 python scripts/bench/linear_attention.py
    OMP_NUM_THREADS=2 python scripts/bench/linear_attention.py --threads 2

Head shapes are those of Qwen3.5 (K = V = 128, two value heads to a key head) and Kimi-Linear, with fewer heads. Medians
of CPU-seconds with one thread, of wall time with more; each round runs every contender once. Memory is the peak of a
process of its own above what it held before, forward + backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halftune_kernels.ops.gated_delta_rule import gated_delta_rule
from halftune_kernels.ops.kda import kda

LENGTHS = (512, 2048, 4096)
HEADS = {"gated delta rule": (4, 8), "Kimi delta attention": (2, 2)}
SIZE = 128
Call = Callable[..., Any]


def contenders(operator: str) -> dict[str, Call]:
    """transformers' undecorated fallback and our operator, both called as a model's layer does."""
    if operator == "gated delta rule":
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as fallback

        ours: Call = gated_delta_rule
    else:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as fallback

        ours = kda
    undecorated: Call = fallback.__wrapped__  # type: ignore[attr-defined]
    return {"transformers": undecorated, "halftune": ours}


def inputs(operator: str, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Fresh q, k, v, g, beta that want gradients, and the gradient of the output."""
    keys, values = HEADS[operator]
    gate = (1, length, values) if operator == "gated delta rule" else (1, length, values, SIZE)
    made = [
        torch.randn(1, length, keys, SIZE),
        torch.randn(1, length, keys, SIZE),
        torch.randn(1, length, values, SIZE),
        -torch.rand(gate),
        torch.rand(1, length, values),
    ]
    return [x.requires_grad_() for x in made], torch.randn(1, length, values, SIZE)


def once(function: Call, given: list[torch.Tensor], gradient: torch.Tensor, clock: Call) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    for tensor in given:
        tensor.grad = None
    q, k, v, g, beta = given
    start = clock()
    out, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
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
    pairs = zip(found["transformers"], found["halftune"], strict=True)
    ratio = statistics.median(sum(theirs) / sum(ours) for theirs, ours in pairs)
    memory = {}
    for name in found:
        command = [sys.executable, __file__, "--peak", operator, str(length), name, "--threads", str(threads)]
        memory[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    cells = [f"{a:,.0f} / {b:,.0f}" for a, b in (mid["transformers"], mid["halftune"])]
    held = f"{memory['transformers']:,.0f} / {memory['halftune']:,.0f}"
    heads = "/".join(map(str, HEADS[operator]))
    return f"| {operator} | {heads} | {length:,} | {threads} | {cells[0]} | {cells[1]} | {ratio:.2f} | {held} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", nargs=3, metavar=("OPERATOR", "LENGTH", "CONTENDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads[0])
    if arguments.peak:
        print(json.dumps(peak(arguments.peak[0], int(arguments.peak[1]), arguments.peak[2])))
        return
    print(
        "| operator, K = V = 128 | heads qk/v | T | threads | transformers, ms forward / backward | halftune | faster"
        " | peak MiB, transformers / halftune |\n|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for operator in HEADS:
            for length in LENGTHS:
                if operator != "gated delta rule" and length > LENGTHS[1]:
                    continue  # transformers' fallback would take a gigabyte for each head
                print(row(operator, length, arguments.rounds, threads), flush=True)


if __name__ == "__main__":
    main()
