"""Trains tiny recipes and writes losses and final weights, bit by bit; says whether another version gives the same.

  python scripts/bench/golden_curves.py curves.json
  python scripts/bench/golden_curves.py --compare curves.json         exit code 1, and a list, where a bit differs

sft, pretrain and dpo × LoRA and full (not dpo) × padded and packed × one process, DDP and FSDP2 over two, and runs that
go on from a checkpoint. Bits depend on the machine and on torch: record and compare on one machine. Two minutes on two
cores; --only takes a part.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import forked, no_plots, planned, read_lines, tiny_model, write_lines

from halftune.train.trainer import train

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHARED = (("single", 1), ("ddp", 2), ("fsdp2", 2))


def prepare(folder: Path) -> None:
    """Writes the model, 48 conversations, documents and pairs."""
    tiny_model(folder / "model", **SIZES, initializer_range=0.1)
    draw = random.Random(7)
    sums = [[draw.randint(1, 99) for _ in range(draw.randint(2, 12))] for _ in range(48)]
    chats = [{"prompt": f"Add {one}.", "completion": f"{' and '.join(map(str, one))} is {sum(one)}"} for one in sums]
    write_lines(folder / "sft.jsonl", chats)
    write_lines(folder / "pretrain.jsonl", [{"text": f"The sum of {one} is {sum(one)}."} for one in sums])
    pairs = [(one["prompt"], one["completion"]) for one in chats]
    rows = [{"prompt": asked, "chosen": said, "rejected": f"No idea of {asked}"} for asked, said in pairs]
    write_lines(folder / "dpo.jsonl", rows)


def recipe(folder: Path, name: str, method: str, adapter: str, packed: bool, strategy: str) -> dict[str, Any]:
    """One run; with two processes, the global batch of one."""
    data = {"train": str(folder / f"{method}.jsonl"), "max_length": 96, "packing": packed, "eval_split": 4}
    return {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 4} if adapter == "lora" else "none",
        "method": method,
        "data": {**data, "cache": False},
        "training": {
            "output_dir": str(folder / name),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2 if strategy == "single" else 1,
            "learning_rate": 1e-2,
            "save_steps": 2,
            "eval_steps": 2,
        },
        "distributed": {"strategy": "auto" if strategy == "single" else strategy},
        "logging": {"progress": False},
    }


def cases(folder: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """Name → recipe and processes; the last ones go on from a checkpoint of an earlier one."""
    found = {}
    methods, adapters = ("sft", "pretrain", "dpo"), ("lora", "full")
    for method, adapter, packed, (strategy, processes) in itertools.product(methods, adapters, (False, True), SHARED):
        if (method, adapter) != ("dpo", "full"):
            name = "-".join((method, adapter, "packed" if packed else "padded", strategy))
            found[name] = (recipe(folder, name, method, adapter, packed, strategy), processes)
    for name in [name for name in found if name.endswith("lora-packed-single")]:
        tree, again = found[name][0], f"{name}-resumed"
        training = {"output_dir": str(folder / again), "resume": str(folder / name / "checkpoint-2")}
        found[again] = ({**tree, "training": {**tree["training"], **training}}, 1)
    return found


def run(tree: dict[str, Any], processes: int, folder: Path) -> None:
    """Trains a recipe in forked processes: no second start of Python."""

    def work(_: int) -> None:
        no_plots()
        torch.set_num_threads(1)
        train(*planned(tree, folder / "recipe.yaml", "cpu", processes))

    forked(processes, work)


def measured(folder: Path) -> dict[str, Any]:
    """Losses as hexadecimal floats, and what the weights' bytes hash to."""
    lines = read_lines(folder / "metrics.jsonl")
    digest = hashlib.sha256()
    for path in sorted((folder / "final").glob("*.safetensors")):
        digest.update(path.read_bytes())
    shown = {name: [line[name].hex() for line in lines if name in line] for name in ("loss", "eval_loss", "grad_norm")}
    return {**shown, "weights": digest.hexdigest()}


def record(only: str) -> dict[str, Any]:
    """Trains every case whose name contains ``only``."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for name, (tree, processes) in cases(folder).items():
            if only in name:
                run(tree, processes, folder)
                found[name] = measured(folder / name)
                print(name, found[name]["loss"][-1], flush=True)
    return found


def main() -> None:
    """Records, or compares with a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="part of a case's name")
    asked = parser.parse_args()
    found = record(asked.only)
    if asked.output is not None:
        asked.output.write_text(json.dumps(found, indent=1) + "\n")
    if asked.compare is None:
        return
    before = json.loads(asked.compare.read_text())
    other = [
        f"{name}: {key}" for name in found for key in found[name] if found[name][key] != before.get(name, {}).get(key)
    ]
    print("\n".join([f"{len(found)} runs, {len(other)} differences", *other]))
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
