"""Hybrid and state-space models train in packed rows, LoRA and full, with the decays in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.train.trainer import train


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("name", ["qwen3_5-tiny", "kimi_linear-tiny", "mamba2-tiny", "rwkv7-tiny"])
def test_packed_training_learns(name: str, adapter: str, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "model": {"name_or_path": f"builtin:{name}"},
        "precision": "fp32",
        "adapter": {"type": adapter},
        "data": {"train": "builtin:python-docs", "max_length": 128, "packing": True},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 6, "learning_rate": 3e-3, "logging_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    loaded = load_config(tmp_path / "recipe.yaml")
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    assert plan.attention.linear.value == "halftune"
    train(loaded, plan)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    if adapter == "none":
        with safe_open(tmp_path / "run" / "final" / "model.safetensors", "pt") as weights:
            decays = [key for key in weights.keys() if key.endswith(("A_log", "dt_bias", "w_lora.lora.2.bias"))]  # noqa: SIM118
            assert decays
            assert {weights.get_slice(key).get_dtype() for key in decays} == {"F32"}
