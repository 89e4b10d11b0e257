"""How much faster this CPU trains in bf16 than in fp32: the ratio behind what ``precision: auto`` takes on a CPU.

  python scripts/bench/cpu_precision.py               builtin models × LoRA and full fine-tuning, a table on stdout
  python scripts/bench/cpu_precision.py small lora    the cases whose name contains all of these words

One thread, planned as halftune plans, rows full. The two precisions take turns step by step in one process, so that
what else the machine does falls on both; speed is tokens per CPU-second (not of the clock on the wall), medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.hardware.probe import probe
from halftune.model.adapters.attach import attach_adapter
from halftune.model.load import load_model
from halftune.plan import resolve
from halftune.precision.dtypes import autocast
from halftune.train.losses import forward_loss_sum
from halftune.train.optim import make_optimizer

ROWS, LENGTH, WARM, STEPS = 8, 256, 2, 9
CASES = {
    f"{model} {adapter}": (f"builtin:{model}", adapter)
    for model in ("qwen2-tiny", "qwen2-small")
    for adapter in ("lora", "none")
}


def trainer(model: str, adapter: str, precision: str) -> Callable[[], float]:
    """A function that trains one step and returns its CPU time in seconds."""
    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": model},
            "precision": precision,
            "adapter": {"type": adapter},
            "data": {"train": ["none.jsonl"], "packing": {"enabled": False}},
            "training": {"output_dir": "none"},
        }
    )
    plan = resolve(config, probe(), read_model_facts(config.model))
    adapted = attach_adapter(load_model(config.model, plan), config.adapter, plan, 0)
    optimizer = make_optimizer(adapted, config.training, plan.precision)
    ids = torch.randint(3, 4000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> float:
        start = time.process_time()
        with autocast(plan.precision, torch.device("cpu")):
            loss, labels = forward_loss_sum(adapted, inputs)
        (loss / labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return step


def main() -> None:
    """Prints one row per case."""
    torch.set_num_threads(1)
    words = sys.argv[1:]
    device = probe().devices[0]
    print(f"{device.name} ({', '.join(sorted(device.features)) or 'no bf16 units'}), torch {torch.__version__}\n")
    print("| case | fp32, tokens per CPU-second | bf16 | bf16 / fp32 |\n|---|---|---|---|")
    for name, (model, adapter) in CASES.items():
        if not all(word in name for word in words):
            continue
        steps = {precision: trainer(model, adapter, precision) for precision in ("fp32", "bf16")}
        seconds: dict[str, list[float]] = {precision: [] for precision in steps}
        for number in range(WARM + STEPS):
            for precision, step in steps.items():
                taken = step()
                if number >= WARM:
                    seconds[precision].append(taken)
        slow, fast = (ROWS * LENGTH / statistics.median(seconds[precision]) for precision in ("fp32", "bf16"))
        ratios = [a / b for a, b in zip(seconds["fp32"], seconds["bf16"], strict=True)]
        print(f"| {name} | {slow:,.0f} | {fast:,.0f} | {statistics.median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
