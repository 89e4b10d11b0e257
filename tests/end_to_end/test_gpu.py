"""What only a CUDA device can tell: the planned formats train there, on the planned attention route."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.probe import probe
from halftune.plan import resolve
from halftune.train.trainer import train

pytestmark = pytest.mark.gpu
ROWS = [{"prompt": f"Add {n} and {n + 1}.", "completion": f"That is {2 * n + 1}. " * (1 + n % 5)} for n in range(64)]


def losses_of(tmp_path: Path, name: str, *overrides: str) -> list[float]:
    """Losses of eight steps on the CUDA device."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 128, "packing": True},
        "training": {
            "output_dir": str(tmp_path / name),
            "max_steps": 8,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "save_steps": 4,
        },
        "logging": {"progress": False},
    }
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    loaded = load_config(tmp_path / f"{name}.yaml", overrides)
    plan = resolve(loaded.run, probe(), read_model_facts(loaded.run.model))
    assert plan.device.value == "cuda"
    folder = train(loaded, plan).folder
    assert json.loads((folder / "guard.json").read_text())["casts"] == 0
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_half_formats_follow_fp32(tmp_path: Path, adapter: str, packing: str) -> None:
    settings = (f"adapter={adapter}", f"data.packing={packing}")
    exact = losses_of(tmp_path, "fp32", "precision=fp32", *settings)
    assert exact[-1] < exact[0]
    formats = ["fp16"] if torch.cuda.get_device_capability() < (8, 0) else ["bf16", "fp16"]
    for compute in formats:
        half = losses_of(tmp_path, compute, f"precision={compute}", *settings)
        assert max(abs(a - b) / b for a, b in zip(half, exact, strict=True)) < 2e-2, compute


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs Ampere")
@pytest.mark.parametrize("packing", ["true", "false"])
def test_fa2_and_sdpa_agree(tmp_path: Path, packing: str) -> None:
    settings = ("precision=bf16", f"data.packing={packing}")
    fa2 = losses_of(tmp_path, "fa2", "attention=fa2", *settings)
    sdpa = losses_of(tmp_path, "sdpa", "attention=sdpa", *settings)
    assert max(abs(a - b) / b for a, b in zip(fa2, sdpa, strict=True)) < 5e-3
