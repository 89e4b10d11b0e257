"""Peak memory and time of the loss of a large head, forward and backward: four ways to compute the same number.

  python scripts/bench/loss_memory.py                       8,192 labels, vocabulary 151,936, hidden size 1,024
  python scripts/bench/loss_memory.py 2048 32000 1024       labels, vocabulary, hidden size

fp32, one thread, a frozen head as under LoRA; each way in a process of its own. Memory is what the peak resident size
grows by over the inputs.
"""

from __future__ import annotations

import json
import resource
import sys

import torch
from harness import case, clock, fresh, head, row
from torch.nn import functional as F

from halftune.model.policy.cross_entropy import cross_entropy_sum
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum

WAYS = {
    "all logits, F.cross_entropy": lambda x, w, t: F.cross_entropy(F.linear(x, w).float(), t, reduction="sum"),
    "all logits, cross-entropy in chunks": lambda x, w, t: cross_entropy_sum(F.linear(x, w), t),
    "torch's F.linear_cross_entropy": lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="sum"),
    "chunks of rows (halftune)": linear_cross_entropy_sum,
}


def measure(way: str, labels: int, words: int, channels: int) -> dict[str, float]:
    """Growth of the peak in MiB, CPU-seconds, and the loss."""
    torch.manual_seed(0)
    hidden = torch.randn(labels, channels, requires_grad=True)
    weight, targets = torch.randn(words, channels).mul_(channels**-0.5), torch.randint(0, words, (labels,))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, clock()
    loss = WAYS[way](hidden, weight, targets)
    loss.backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"mib": grown / 1024, "seconds": clock() - began, "loss": float(loss.detach())}


def main() -> None:
    """Prints a row per way."""
    if (words := case()) is not None:
        print(json.dumps(measure(words[0], *map(int, words[1:]))))
        return
    sizes = sys.argv[1:4] or ["8192", "151936", "1024"]
    print(
        head(f"{sizes[0]} labels, vocabulary {sizes[1]}, hidden size {sizes[2]}", "peak grows by MiB", "CPU-s", "loss")
    )
    for way in WAYS:
        found = fresh(way, *sizes)
        numbers = (
            (found["note"], "", "")
            if "note" in found
            else (f"{found['mib']:,.0f}", f"{found['seconds']:.1f}", f"{found['loss']:.2f}")
        )
        print(row(way, *numbers), flush=True)


if __name__ == "__main__":
    main()
