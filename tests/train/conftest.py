"""A small real run: a smaller sister of the embedded tiny model on a few generated rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.config.sections.model import ModelSection
from halftune.hardware.catalogue import lookup
from halftune.model.files.architectures import no_progress_bars
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.callbacks.loss_plot import LossPlot


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


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded tiny model, a third as wide and half as deep (0.3 M parameters), with its tokenizer."""
    return random_model(tmp_path_factory.mktemp("small-model"), 0)


@pytest.fixture(scope="session")
def small_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same sizes with other weights."""
    return random_model(tmp_path_factory.mktemp("small-teacher"), 1)


def random_model(folder: Path, seed: int) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.1  # for logits of a usual size at this width: an adapter has something to move
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**{**BUILTIN_MODELS["qwen2-tiny"], **sizes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_tokenizer(ModelSection(name_or_path="builtin:qwen2-tiny")).save_pretrained(folder)
    return folder


@pytest.fixture
def drawn() -> None:
    """Plots are drawn."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """A plot takes longer than the run; a test that looks at it asks for ``drawn``."""
    with pytest.MonkeyPatch.context() as patch:
        if "drawn" not in request.fixturenames:
            patch.setattr(LossPlot, "_draw", lambda *_: None)
        yield


@pytest.fixture
def recipe(tmp_path: Path, rows_file: Path, small_model: Path) -> Callable[..., tuple[Any, Any]]:
    """``recipe("training.max_steps=4", ...)`` → (loaded config, its plan on a CPU)."""

    def make(*overrides: str, machine: str = "cpu", world_size: int = 1) -> tuple[Any, Any]:
        tree = {
            "model": {"name_or_path": str(small_model)},
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
            "logging": {"progress": False, "probes": 0},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        loaded = load_config(path, overrides)
        return loaded, resolve(loaded.run, lookup(machine), run_facts(loaded.run), world_size=world_size)

    return make


@pytest.fixture
def losses() -> Callable[[Path], list[float]]:
    """Training losses of a run folder, in order of steps."""

    def read(folder: Path) -> list[float]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    return read
