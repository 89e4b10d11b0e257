"""Real instruction data on tiny models, LoRA and full, bf16 and fp32: they learn, and save what was planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.train.trainer import train

SETS = {
    "alpaca": {"path": "alpaca_en_demo.json"},
    "gsm8k": {"path": "gsm8k/train.jsonl", "columns": {"prompt": "question", "completion": "answer"}, "samples": 500},
    "glaive": {"path": "glaive_toolcall_en_demo.json"},
}


# Each set once, and each adapter in each format. In bf16 a handful of tokens: a processor without bf16 units multiplies
# up to 100 times slower in it.
CASES = [
    ("alpaca", "fp32", "lora"),
    ("gsm8k", "fp32", "none"),
    ("glaive", "fp32", "lora"),
    ("gsm8k", "bf16", "lora"),
    ("gsm8k", "bf16", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "adapter"), CASES)
def test_it_learns(name: str, precision: str, adapter: str, shared_data: Path, tmp_path: Path) -> None:
    length = 512 if name == "glaive" else 256 if precision == "fp32" else 64
    source = {**SETS[name], "path": str(shared_data / SETS[name]["path"])}
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny" if name == "gsm8k" else "builtin:qwen2-small"},
        "precision": precision,
        "adapter": adapter,
        "data": {"train": [source], "max_length": length, "packing": True},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 12 if name == "alpaca" else 8,
            "per_device_train_batch_size": 1 if precision == "bf16" else 2,
            "learning_rate": 3e-3 if adapter == "lora" else 1e-3,
            "warmup_ratio": 0.0,
            "save_steps": "end",
        },
        "logging": {"progress": False},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    loaded = load_config(tmp_path / "x.yaml")
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    folder = train(loaded, plan).folder
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == tree["training"]["max_steps"]
    assert sum(losses[-3:]) / 3 < 0.95 * losses[0], losses
    weights = folder / "final" / ("adapter_model.safetensors" if adapter == "lora" else "model.safetensors")
    with safe_open(weights, "pt") as file:
        dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert dtypes == {{"fp32": "F32", "bf16": "BF16"}[plan.precision.saved.value]}


GSM8K = {"path": "gsm8k/train.jsonl", "columns": {"prompt": "question", "completion": "answer"}, "samples": 8}
METHODS = {
    "dpo": ({"beta": 0.1}, {"path": "dpo_en_demo.json", "samples": 8}),
    "simpo": ({}, {"path": "dpo_en_demo.json", "samples": 8}),
    "orpo": ({"beta": 1.0}, {"path": "dpo_en_demo.json", "samples": 8}),
    "cpo": ({}, {"path": "dpo_en_demo.json", "samples": 8}),
    "reward": ({}, {"path": "dpo_en_demo.json", "samples": 8}),
    "kto": ({}, {"path": "kto_en_demo.json", "samples": 8}),
    "grpo": ({"rewards": "exact_answer", "num_generations": 2, "max_completion_length": 8}, GSM8K),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_judged_answers_move_what_they_should(method: str, shared_data: Path, tmp_path: Path) -> None:
    keys, source = METHODS[method]
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 8},
        "data": {"train": [{**source, "path": str(shared_data / source["path"])}], "max_length": 96, "packing": True},
        "method": {"type": method, **keys},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 2 if method == "grpo" else 12,
            "per_device_train_batch_size": 1 if method == "kto" else 4,
            "learning_rate": 3e-3,
            "warmup_ratio": 0.0,
            "save_steps": "end",
            "logging_steps": 1,
        },
        "logging": {"progress": False},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    loaded = load_config(tmp_path / "x.yaml")
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    folder = train(loaded, plan).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if method == "grpo":  # a random model has no answers
        assert [line["reward"] for line in lines] == [0, 0]
        assert {"entropy", "equal_rewards", "completion_length"} <= lines[0].keys()
        return
    good, bad = ([line[f"rewards/{name}"] or 0 for line in lines] for name in ("chosen", "rejected"))
    margins = [a - b for a, b in zip(good, bad, strict=True)]
    assert sum(margins[-4:]) > sum(margins[:4]) + 0.1
    if "rewards/accuracies" in lines[0]:
        assert sum(line["rewards/accuracies"] for line in lines[-4:]) / 4 > 0.9
