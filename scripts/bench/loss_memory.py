"""Peak memory and time of the loss of a large head, forward and backward: four ways to compute the same number.

  python scripts/bench/loss_memory.py                       8,192 labels, 151,936 words, 1,024 channels
  python scripts/bench/loss_memory.py 2048 32000 1024       labels, words, channels

fp32, one thread, a frozen head as under LoRA; each way in a process of its own. Memory is what the peak resident size
grows by over the inputs.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.nn import functional as F

from halftune.train.losses import cross_entropy_sum
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum

WAYS = {
    "all logits, F.cross_entropy": lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t, reduction="sum"),
    "all logits, cross-entropy in chunks": lambda x, w, t: cross_entropy_sum(F.linear(x, w), t),
    "torch's F.linear_cross_entropy": lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="sum"),
    "rows at a time (ours)": linear_cross_entropy_sum,
}


def measure(way: str, labels: int, words: int, channels: int) -> tuple[float, float, float]:
    """Growth of the peak in MiB, CPU-seconds, and the loss."""
    torch.manual_seed(0)
    hidden = torch.randn(labels, channels, requires_grad=True)
    weight, targets = torch.randn(words, channels).mul_(channels**-0.5), torch.randint(0, words, (labels,))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    loss = WAYS[way](hidden, weight, targets)
    loss.backward()
    seconds = time.process_time() - began
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds, float(loss.detach())


def main() -> None:
    """Prints a row per way."""
    if sys.argv[1:2] == ["--way"]:
        print(*measure(sys.argv[2], *map(int, sys.argv[3:])))
        return
    sizes = sys.argv[1:4] or ["8192", "151936", "1024"]
    print(f"| {sizes[0]} labels, {sizes[1]} words, {sizes[2]} channels | peak grows by MiB | CPU-s | loss |")
    print("|---|---:|---:|---:|")
    for way in WAYS:
        done = subprocess.run([sys.executable, __file__, "--way", way, *sizes], capture_output=True, text=True)
        if done.returncode:
            print(f"| {way} | {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'} | | |", flush=True)
            continue
        grown, seconds, loss = map(float, done.stdout.split())
        print(f"| {way} | {grown:,.0f} | {seconds:.1f} | {loss:.2f} |", flush=True)


if __name__ == "__main__":
    main()
