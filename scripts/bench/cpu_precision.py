"""How much faster this CPU trains in bf16 than in fp32: the ratio behind what ``precision: auto`` takes on a CPU.

  python scripts/bench/cpu_precision.py               builtin models × LoRA and full fine-tuning, a table on stdout
  python scripts/bench/cpu_precision.py small lora    the cases whose name contains all of these words

One thread, planned as halftune plans, rows full. The two precisions take turns step by step in one process; speed is
tokens per CPU-second, medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from harness import clock, head, in_turn, planned, ratio, row

from halftune.data.batch import Batch
from halftune.hardware.probe import probe
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.optim import make_optimizer
from halftune.precision.dtypes import autocast

ROWS, LENGTH, STEPS = 8, 256, 9


def trainer(model: str, adapter: str, precision: str) -> Callable[[], float]:
    """A function that trains one step and returns its CPU time in seconds."""
    tree = {
        "model": {"name_or_path": f"builtin:{model}"},
        "precision": precision,
        "adapter": adapter,
        "data": {"train": "builtin:stdlib-text", "packing": False},
        "training": {"output_dir": "none"},
    }
    with tempfile.TemporaryDirectory() as folder:
        loaded, plan = planned(tree, Path(folder, "recipe.yaml"))
    adapted = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    optimizer = make_optimizer(adapted, loaded.run.training, plan.precision)
    ids = torch.randint(3, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> float:
        start = clock()
        with autocast(plan.precision, torch.device("cpu")):
            loss = PolicyModel(adapted).nll_sum(Batch(inputs))
        (loss / ids[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - start

    return step


def main() -> None:
    """Prints one row per case."""
    torch.set_num_threads(1)
    device = probe().devices[0]
    print(f"{device.name} ({', '.join(sorted(device.features)) or 'no bf16 units'}), torch {torch.__version__}\n")
    print(head("case", "fp32, tokens per CPU-second", "bf16", "bf16 / fp32"))
    for model in ("qwen2-tiny", "qwen2-small"):
        for adapter in ("lora", "none"):
            if all(word in f"{model} {adapter}" for word in sys.argv[1:]):
                sides = {precision: trainer(model, adapter, precision) for precision in ("fp32", "bf16")}
                found = in_turn(sides, STEPS, warm=2)
                speeds = [f"{ROWS * LENGTH / statistics.median(seconds):,.0f}" for seconds in found.values()]
                print(row(f"{model} {adapter}", *speeds, f"{ratio(found, 'fp32', 'bf16'):.2f}"), flush=True)


if __name__ == "__main__":
    main()
