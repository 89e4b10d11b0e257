"""Hybrid models from the recipe to plain files: packed or not, recomputed or kept, decays in fp32 in what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.train.trainer import train

pytestmark = pytest.mark.slow
KEPT = {
    "qwen3_5-tiny": ("A_log", "dt_bias"),
    "kimi_linear-tiny": ("A_log", "dt_bias"),
    "mamba2-tiny": ("A_log", "dt_bias", "D"),
    "rwkv7-tiny": ("k_k", "k_a", "r_k", "w_lora.lora.2.bias", "a_lora.lora.2.bias"),
}
ROWS = [{"prompt": f"What is {n} plus {3 * n}?", "completion": f"It is {4 * n}. " * (1 + n % 4)} for n in range(4)]


def losses(folder: Path, name: str, adapter: str, precision: str, packing: bool, **training: Any) -> list[float]:
    """Losses of three steps over all rows at once, and the evaluation's."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    how = {"max_steps": 3, "eval_steps": 3, "learning_rate": 2e-3, "warmup_steps": 0, **training}
    recipe: dict[str, Any] = {
        "model": {"name_or_path": f"builtin:{name}"},
        "precision": precision,
        "adapter": {"type": adapter},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "eval": str(folder / "rows.jsonl"),
            "max_length": 256,
            "packing": packing,
        },
        "training": {
            "output_dir": str(folder / "run"),
            "per_device_train_batch_size": 1 if packing else len(ROWS),
            **how,
        },
        "logging": {"progress": False, "probes": 0},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    loaded = load_config(folder / "recipe.yaml")
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    assert plan.attention.linear.value == "halftune"
    train(loaded, plan)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for key in ("loss", "eval_loss") for line in lines if key in line]


def decays_are_fp32(weights: Path, name: str) -> set[str]:
    """Of a file of tensors; returns all formats that it holds."""
    with safe_open(weights, "pt") as tensors:
        formats = {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    kept = {key for key in formats if key.endswith(KEPT[name])}
    assert kept
    assert {formats[key] for key in kept} == {"F32"}
    return set(formats.values())


@pytest.mark.parametrize(
    ("name", "adapter"), [*((name, "none") for name in KEPT), ("qwen3_5-tiny", "lora"), ("rwkv7-tiny", "lora")]
)
def test_packed_is_not_packed_and_recomputed_is_kept(name: str, adapter: str, tmp_path: Path) -> None:
    def run(packing: bool, recompute: bool) -> list[float]:
        folder = tmp_path / f"{packing}-{recompute}"
        folder.mkdir()
        return losses(folder, name, adapter, "fp32", packing, gradient_checkpointing=recompute)

    packed, recomputed = run(True, False), run(True, True)
    assert len(packed) == 4
    assert packed[2] < packed[0]
    assert recomputed == pytest.approx(packed, rel=1e-6)
    if adapter == "none":
        assert packed == pytest.approx(run(False, False), rel=1e-5)
        decays_are_fp32(tmp_path / "True-False" / "run" / "final" / "model.safetensors", name)


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("name", KEPT)
def test_decays_are_fp32_in_what_is_exported(name: str, adapter: str, tmp_path: Path) -> None:
    losses(tmp_path, name, adapter, "bf16", packing=True, max_steps=1, eval_steps=1)
    export_run(open_run(str(tmp_path / "run")), tmp_path / "plain", "bf16")
    assert "BF16" in decays_are_fp32(tmp_path / "plain" / "model.safetensors", name)
