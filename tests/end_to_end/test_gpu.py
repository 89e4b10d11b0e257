"""What only a CUDA device can tell: the planned formats train there, on the planned attention route."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from halftune.attention.backends import BACKENDS
from halftune.attention.route import objections
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.optimizers import OPTIMIZERS
from halftune.hardware.probe import probe
from halftune.plan import resolve
from halftune.train.trainer import train

pytestmark = pytest.mark.gpu
ROWS = [{"prompt": f"Add {n} and {n + 1}.", "completion": f"That is {2 * n + 1}. " * (1 + n % 5)} for n in range(64)]


def losses_of(tmp_path: Path, name: str, *overrides: str) -> list[float]:
    """Losses of eight steps on the CUDA device."""
    return [line["loss"] for line in metrics_of(tmp_path, name, *overrides)]


def metrics_of(tmp_path: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """Metrics of eight steps on the CUDA device."""
    loaded = load_config(recipe(tmp_path, name), overrides)
    plan = resolve(loaded.run, probe(), read_model_facts(loaded.run.model))
    assert plan.device.value == "cuda"
    folder = train(loaded, plan).folder
    assert json.loads((folder / "guard.json").read_text())["casts"] == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def recipe(tmp_path: Path, name: str) -> Path:
    """A recipe of eight steps and its rows."""
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
        "logging": {"progress": False, "probes": 0},
    }
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


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
    facts = read_model_facts(load_config(recipe(tmp_path, "facts")).run.model)
    ways = [[*objections(row, probe(), facts, "bf16", packing == "true")] for row in BACKENDS if row.name == "fa2"]
    if all(ways):
        pytest.skip("; ".join(why for way in ways for why in way))
    settings = ("precision=bf16", f"data.packing={packing}")
    fa2 = losses_of(tmp_path, "fa2", "attention=fa2", *settings)
    sdpa = losses_of(tmp_path, "sdpa", "attention=sdpa", *settings)
    assert max(abs(a - b) / b for a, b in zip(fa2, sdpa, strict=True)) < 5e-3


def test_an_fp16_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path) -> None:
    """A loss scale of 2^40 overflows every fp16 gradient until it has been halved often enough."""
    made = torch.amp.GradScaler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", lambda *given, **how: made(*given, **{**how, "init_scale": 2.0**40}))
        metrics = metrics_of(tmp_path, "overflow", "precision=fp16", "training.max_steps=40")
    skipped = [line["skipped"] for line in metrics]
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, adapter: str, compute: str) -> None:
    """The second half of a run, again, from the checkpoint in its middle: equal losses."""
    if compute == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 needs Ampere")
    settings = (f"adapter={adapter}", f"precision={compute}")
    whole = losses_of(tmp_path, "run", *settings)
    folder = tmp_path / "run"
    for name in ("checkpoint-8", "final"):
        shutil.rmtree(folder / name)
    (folder / "finished.json").unlink()
    assert losses_of(tmp_path, "run", *settings) == whole


@pytest.mark.parametrize(
    "name", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw", "lion_8bit", "adamw_torch_8bit", "adamw_torch_4bit"]
)
def test_optimizers_of_other_packages_train_and_resume_exactly(tmp_path: Path, name: str) -> None:
    pytest.importorskip(OPTIMIZERS[name].package)
    asked = (f"training.optim={name}", "adapter=none", "training.learning_rate=1e-4", "training.deterministic=true")
    whole = losses_of(tmp_path, "whole", *asked)
    assert whole[-1] < whole[0]
    resumed = losses_of(tmp_path, "rest", *asked, f"training.resume={tmp_path / 'whole' / 'checkpoint-4'}")
    assert resumed[-4:] == whole[-4:]
