"""How far the plan's memory estimate is from reality with images: trains on the CPU and reads the peak RSS.

  python scripts/bench/image_memory.py [WORD …]      the cases whose name contains one of the words

Each case is a process of its own that trains three steps. Pictures fill the rows, and rows ``data.max_length``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import head, machine, read_lines, row
from image_features import write_model, write_pictures

SMALL: dict[str, Any] = {}
LARGE = {"depth": 12, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "patch_size": 14,
         "window_size": 112, "fullatt_block_indexes": [5, 11]}  # fmt: skip
TRAINED = {"vision": "full", "projector": "full"}
ADAPTED = {"vision": "lora", "projector": "full"}
# name → tower, pixels of a side, tokens of a row, rows, changes of the recipe
CASES: dict[str, tuple[dict[str, Any], int, int, int, dict[str, Any]]] = {
    "builtin, lora": (SMALL, 308, 288, 8, {}),
    "builtin, full": (SMALL, 308, 288, 8, {"adapter": "none"}),
    "builtin, towers in full": (SMALL, 308, 288, 8, {"adapter": "none", "train": TRAINED}),
    "tower of 52 M, lora": (LARGE, 280, 136, 4, {}),
    "tower of 52 M, lora, bf16": (LARGE, 280, 136, 4, {"precision": "bf16"}),
    "tower of 52 M, lora on both": (LARGE, 280, 136, 4, {"train": ADAPTED}),
    "tower of 52 M, both in full": (LARGE, 280, 136, 4, {"adapter": "none", "train": TRAINED}),
}
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")


def measure(name: str) -> tuple[dict[str, int], int]:
    """The plan's memory (bytes by part) and the peak resident memory of the training process in bytes.

    Raises:
        SystemExit: the run fails.
    """
    tower, side, length, rows, changes = CASES[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["HALFTUNE_CACHE"] = str(folder / "cache")
        write_model(folder / "model", tower)
        write_pictures(folder, side, rows)
        tree = {
            "model": {"name_or_path": "model", "train": changes.get("train", {})},
            "precision": changes.get("precision", "fp32"),
            "adapter": changes.get("adapter", "lora"),
            "data": {"train": "rows.jsonl", "images": True, "max_length": length, "packing": False,
                     "cache_features": False},
            "training": {"output_dir": "run", "max_steps": 3, "per_device_train_batch_size": rows, "save_steps": "end",
                         "gradient_checkpointing": False},
        }  # fmt: skip
        (folder / "recipe.yaml").write_text(json.dumps(tree))
        command = [sys.executable, "-m", "halftune", "train", "--config", "recipe.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}\n{done.stderr[-2000:]}")
        plan, lines = json.loads((folder / "run/plan.json").read_text()), read_lines(folder / "run/metrics.jsonl")
        print(f"{name}: {lines[0].get('tokens')} tokens in a step", file=sys.stderr)
        return plan["memory"], max(line["memory_bytes"] for line in lines if "memory_bytes" in line)


def main() -> None:
    """Prints one row per case and the mean and worst error."""
    words = sys.argv[1:]
    print(head("case", *PARTS, "estimate", "measured", "error"))
    errors = []
    for name in CASES:
        if not words or any(word in name for word in words):
            memory, peak = measure(name)
            errors.append(memory["total"] / peak - 1)
            sizes = [f"{size / 2**20:.0f}" for size in (*(memory[part] for part in PARTS), memory["total"], peak)]
            print(row(name, *sizes, f"{errors[-1]:+.0%}"), flush=True)
    mean = sum(map(abs, errors)) / len(errors)
    print(f"\nMiB. Mean absolute error {mean:.0%}, from {min(errors):+.0%} to {max(errors):+.0%}. {machine()}.")


if __name__ == "__main__":
    main()
