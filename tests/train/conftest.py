"""A small real run: the embedded tiny model on a few generated rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from halftune.config.load import load_config
from halftune.config.model_facts import read_model_facts
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 prompt/completion rows of very different lengths."""
    generator = random.Random(7)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = []
    for _ in range(96):
        numbers = [generator.randint(1, 99) for _ in range(generator.randint(2, 12))]
        answer = " then ".join(map(str, numbers)) + f" is {sum(numbers)}"
        rows.append({"prompt": f"Add {numbers}.", "completion": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recipe(tmp_path: Path, rows_file: Path) -> Callable[..., tuple[Any, Any]]:
    """``recipe("training.max_steps=4", ...)`` → (loaded config, its plan on a CPU)."""

    def make(*overrides: str, machine: str = "cpu", world_size: int = 1) -> tuple[Any, Any]:
        tree = {
            "model": {"name_or_path": "builtin:qwen2-tiny"},
            "precision": "fp32",
            "adapter": {"type": "lora", "rank": 4},
            "data": {"train": str(rows_file), "max_length": 96, "packing": False},
            "training": {
                "output_dir": str(tmp_path / "run"),
                "max_steps": 8,
                "per_device_train_batch_size": 8,
                "learning_rate": 1e-3,
                "save_steps": "end",
            },
            "logging": {"progress": False},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        loaded = load_config(path, overrides)
        return loaded, resolve(loaded.run, lookup(machine), read_model_facts(loaded.run.model), world_size=world_size)

    return make


@pytest.fixture
def losses() -> Callable[[Path], list[float]]:
    """Training losses of a run folder, in order of steps."""

    def read(folder: Path) -> list[float]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    return read
