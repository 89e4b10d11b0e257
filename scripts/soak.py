"""Trains the builtin model for a while, saving all the time, with a reader that polls the run folder.

    python scripts/soak.py                    15 minutes, a save every 10 seconds
    python scripts/soak.py --minutes 2 --every 5

A second process looks at the folder every quarter of a second: every checkpoint that is there under its final name must
be valid to the last byte, and the newest one must never be older than the one seen before. The first process notes the
memory that it keeps after each save. It fails when a checkpoint was invalid, or when memory grows: a line through the
second half of the measurements may not rise by more than 2 % of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import psutil
import yaml

from halftune.train.run_folder.checkpoints import find_damage, folders, step_of


def watch(folder: Path, ready: Event, met: Event, stop: Event, verdict: Path) -> None:
    """Polls the folder from ``ready`` until ``stop``; writes how often it looked, what it saw and what was wrong.

    ``met`` is set once it has seen a checkpoint.
    """
    seen: set[int] = set()
    wrong: list[str] = []
    looks, newest = 0, -1
    ready.set()
    while not stop.is_set():
        looks += 1
        found = folders(folder)
        for path in found[-1:]:
            step = step_of(path)
            why = find_damage(path, thorough=True)
            # Removed by rotation since it was listed: a newer one has come.
            if why and (path.exists() or folders(folder)[-1:] == [path]):
                wrong.append(f"{path.name}: {why}")
            if step < newest:
                wrong.append(f"the newest was {newest} and is {step}")
            newest = max(newest, step)
            seen.add(step)
            met.set()
        time.sleep(0.25)
    verdict.write_text(json.dumps({"looks": looks, "seen": len(seen), "wrong": wrong}), encoding="utf-8")


def soak(folder: Path, seconds: float, every: float, met: Event) -> list[float]:
    """Trains until the time is over and the reader has met a checkpoint; returns the resident MiB after each save."""
    from halftune.config.facts.model import read_model_facts
    from halftune.config.load import load_config
    from halftune.hardware.catalogue import lookup
    from halftune.plan import resolve
    from halftune.train import trainer

    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "data": {"train": "builtin:python-docs", "max_length": 64},
        "training": {
            "output_dir": str(folder),
            "num_train_epochs": 100_000,
            "per_device_train_batch_size": 1,
            "save_steps": 10**9,  # the clock decides, below
            "logging_steps": 5,
        },
        "logging": {"progress": False},
    }
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loaded = load_config(recipe)
    end, due = time.monotonic() + seconds, time.monotonic() + every
    memory: list[float] = []
    process = psutil.Process()

    class Timed(trainer.Trainer):
        """Saves by the clock and ends by the clock."""

        def _evaluate_and_save(self) -> None:
            nonlocal due
            run = self.run
            if time.monotonic() >= due:
                self._save()
                due = time.monotonic() + every
                memory.append(process.memory_info().rss / 2**20)
            if time.monotonic() >= end and met.is_set():
                run.stop = "the time is over"

    trainer.Trainer = Timed  # type: ignore[misc]
    outcome = trainer.train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
    print(outcome.message)
    return memory


def growth(memory: list[float]) -> float:
    """By how much a straight line through the second half rises, as a share of its mean."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0
    middle, mean = (len(half) - 1) / 2, sum(half) / len(half)
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(half)) / sum(
        (i - middle) ** 2 for i in range(len(half))
    )
    return slope * (len(half) - 1) / mean


def main() -> None:
    """Soaks and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two saves")
    options = parser.parse_args()
    room = Path(tempfile.mkdtemp(prefix="soak-"))
    context = multiprocessing.get_context("spawn")
    ready, met, stop, verdict = context.Event(), context.Event(), context.Event(), room / "verdict.json"
    reader = context.Process(target=watch, args=(room / "run", ready, met, stop, verdict), daemon=True)
    reader.start()
    ready.wait()
    memory = soak(room / "run", options.minutes * 60, options.every, met)
    stop.set()
    reader.join()
    found = json.loads(verdict.read_text(encoding="utf-8"))
    print(f"{len(memory)} saves; the reader looked {found['looks']} times and saw {found['seen']} checkpoints")
    marks = memory[:: max(1, len(memory) // 8)]
    print("resident MiB after saves:", ", ".join(f"{value:.0f}" for value in marks), f"… {memory[-1]:.0f}")
    print(f"growth over the second half: {growth(memory):+.2%}")
    for line in found["wrong"]:
        print("WRONG:", line)
    shutil.rmtree(room)
    sys.exit(1 if found["wrong"] or not memory or growth(memory) > 0.02 else 0)


if __name__ == "__main__":
    main()
