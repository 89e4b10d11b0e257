"""What each change to the training step buys: tokens per CPU-second with one after the other switched on.

  python scripts/bench/step.py                     both builtin Qwen2 models, fp32 and bf16; a table on stdout
  python scripts/bench/step.py qwen2-tiny fp32     the cases that contain all of these words

One thread. The variants take turns on the same packed batches in one process (one process a case), so that what else
the machine does falls on all of them; medians of non-padding tokens per CPU-second. Only the first row has no turns:
what the allocator is told cannot be taken back. LoRA of rank 8 on all linear layers, eight rows of 512 tokens a batch.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from halftune.attention import segments
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.probe import probe
from halftune.model.fused import fuse
from halftune.plan import resolve
from halftune.train import losses, memory, setup
from halftune.train.step import Stepper

BATCHES = {"qwen2-tiny": 9, "qwen2-small": 5}
CASES = [(model, precision) for model in BATCHES for precision in ("fp32", "bf16")]
RECIPE = """\
model: {{name_or_path: "builtin:{model}"}}
precision: {precision}
adapter: {{type: lora, rank: 8, alpha: 16}}
data: {{train: "builtin:python-docs", max_length: 512, packing: true}}
training: {{output_dir: run, max_steps: 1000, per_device_train_batch_size: 8, fused_layers: false}}
"""
IN_BLOCKS, PLAIN_HEAD = segments._LONGEST_IN_BLOCKS, losses.plain_head


def prepare(model: str, precision: str, folder: Path) -> tuple[Stepper, list[Any], torch.nn.Module]:
    """A stepper, batches and the model, without any of the changes; the allocator as the C library has it."""
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, precision=precision))
    loaded = load_config(folder / "recipe.yaml")
    setup.keep_freed_memory = lambda: False
    session = setup.build(loaded, resolve(loaded.run, probe(), read_model_facts(loaded.run.model)), folder)
    trained = session.trained
    stepper = Stepper(
        session.accelerator,
        session.strategy,
        session.wrapped,
        trained.optimizer,
        trained.schedule,
        trained.scaler,
        session.run.plan,
        1.0,
        lambda *_: None,
    )
    steps = session.feed.steps(0, 1000)
    return stepper, [next(steps)[1] for _ in range(BATCHES[model])], session.run.model


def timed(stepper: Stepper, batch: Any) -> float:
    """Non-padding tokens per CPU-second of one step."""
    began = time.process_time()
    tokens = stepper.step(batch).tokens_real
    return tokens / (time.process_time() - began)


def measure(model: str, precision: str) -> dict[str, float]:
    """Median speed of each variant; every one has the changes of those before it."""
    with tempfile.TemporaryDirectory() as name:
        stepper, batches, net = prepare(model, precision, Path(name))
        switches: dict[str, Callable[[], Any]] = {
            "separate operations": lambda: None,
            "+ attention in blocks": lambda: setattr(segments, "_LONGEST_IN_BLOCKS", IN_BLOCKS),
            "+ loss without logits": lambda: setattr(losses, "plain_head", PLAIN_HEAD),
            "+ fused layers": lambda: fuse(net),
        }
        speeds: dict[str, list[float]] = {variant: [] for variant in switches}
        before: list[float] = []  # as the C library allocates; the choice cannot be taken back
        for round_, batch in enumerate([batches[0], *batches]):
            _off()
            before.append(timed(stepper, batch))
            if round_ == len(batches):
                memory.keep_freed_memory()
        for batch in [batches[0], *batches]:
            _off()
            for variant, switch in switches.items():
                done = switch()
                speeds[variant].append(timed(stepper, batch))
            done.remove()
            gc.collect()
    return {
        "separate operations, memory given back": statistics.median(before[1:]),
        **{variant: statistics.median(found[1:]) for variant, found in speeds.items()},
    }


def _off() -> None:
    segments._LONGEST_IN_BLOCKS = 0
    losses.plain_head = lambda *_: None


def main() -> None:
    """Runs every chosen case in a process of its own and prints a row per variant."""
    if sys.argv[1:2] == ["--case"]:
        for variant, speed in measure(*sys.argv[2:4]).items():
            print(f"{variant}\t{speed}")
        return
    cases = [case for case in CASES if all(word in case for word in sys.argv[1:])]
    columns: dict[str, dict[str, float]] = {}
    for case in cases:
        command = [sys.executable, __file__, "--case", *case]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        columns[" ".join(case)] = {variant: float(speed) for variant, speed in (line.split("\t") for line in lines)}
    print(f"| tokens per CPU-second | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for variant in next(iter(columns.values())):
        cells = [
            f"{found[variant]:,.0f} ({found[variant] / next(iter(found.values())):.2f}×)" for found in columns.values()
        ]
        print(f"| {variant} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
