"""A frozen vision tower that is computed once per image, beside one that is computed in every step.

  python scripts/bench/image_features.py [--rounds 3]         a Markdown table on stdout

Three epochs of LoRA on made pictures, each side in a process of its own, in turn. ``kept`` starts with an empty cache,
``kept before`` finds all features. Losses are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness import cpu_seconds, head, in_turn, machine, row, write_lines

# name → pixels of a side, pictures, and sizes of the tower
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "builtin:qwen2_5_vl-tiny (0.6 M in the tower)": (56, 96, {}),
    "its decoder with a tower of 52 M": (
        280, 24, {"depth": 12, "hidden_size": 512, "intermediate_size": 2048, "num_heads": 8, "patch_size": 14,
                  "window_size": 112, "fullatt_block_indexes": [5, 11]},
    ),
}  # fmt: skip
SIDES = {"computed": "false", "kept": "true", "kept before": "true"}


def write_model(folder: Path, tower: dict[str, Any]) -> None:
    """The builtin model that sees, with another tower of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from halftune.model.files.architectures import no_progress_bars
    from halftune.model.files.builtin import materialize

    shutil.copytree(materialize("qwen2_5_vl-tiny"), folder)
    if not tower:
        return
    config: Any = AutoConfig.from_pretrained(folder)
    config.vision_config.update(tower)
    torch.manual_seed(0)
    with no_progress_bars():
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    path, size = folder / "preprocessor_config.json", {"shortest_edge": 784, "longest_edge": 1 << 20}
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": tower["patch_size"], "size": size}))
    (folder / "manifest.json").unlink()  # of the builtin model's files


def write_pictures(folder: Path, side: int, count: int) -> None:
    """Rows of made pictures, as files."""
    import io

    from PIL import Image

    from halftune.data.sources.builtin.patterns import rows

    made = []
    for number, one in enumerate(rows(count, seed=0)):
        name = f"{number}.png"
        Image.open(io.BytesIO(one["images"][0]["bytes"])).resize((side, side)).save(folder / name)
        made.append({**one, "images": [name]})
    write_lines(folder / "rows.jsonl", made)


def recipe(folder: Path) -> None:
    """LoRA on the language model, in fp32."""
    tree = {
        "model": {"name_or_path": "model"},
        "precision": "fp32",
        "data": {"train": "rows.jsonl", "images": True, "max_length": 256, "image_max_pixels": 1 << 20},
        "training": {"output_dir": "run", "per_device_train_batch_size": 4, "num_train_epochs": 3, "save_steps": "end"},
        "logging": {"progress": False},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))


def train(folder: Path, side: str) -> float:
    """CPU-seconds of a run.

    Raises:
        SystemExit: it fails.
    """
    shutil.rmtree(folder / side, ignore_errors=True)
    if side == "kept":
        shutil.rmtree(Path(os.environ["HALFTUNE_CACHE"]) / "features", ignore_errors=True)
    words = [f"data.cache_features={SIDES[side]}", f"training.output_dir={side}"]
    seconds = cpu_seconds([sys.executable, "-m", "halftune", "train", "--config", "recipe.yaml", *words], folder)
    if not (folder / side / "final").is_dir():
        sys.exit(f"{side} failed")
    return seconds


def losses(folder: Path) -> list[float]:
    """Training losses."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(head("model", "images", *(f"{side}, CPU-s" for side in SIDES), "features, MiB", "same losses"))
    for name, (side, count, tower) in MODELS.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            os.environ["HALFTUNE_CACHE"] = str(folder / "cache")
            write_model(folder / "model", tower)
            write_pictures(folder, side, count)
            recipe(folder)
            found = in_turn({one: partial(train, folder, one) for one in SIDES}, rounds)
            kept = sum(path.stat().st_size for path in (folder / "cache" / "features").rglob("*.features"))
            same = all(losses(folder / one) == losses(folder / "computed") for one in SIDES)
            seconds = (f"{statistics.median(found[one]):.1f}" for one in SIDES)
            print(row(name, f"{count} of {side} × {side}", *seconds, f"{kept / 2**20:.1f}", "yes" if same else "no"))
    print(f"\n`python {' '.join(sys.argv)}`, {machine()}")


if __name__ == "__main__":
    main()
