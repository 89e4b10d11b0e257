"""Tensors for multi-token prediction: the plan says that they are not trained, results hold them as they came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, finished_run, section

from halftune.config.facts.architecture import prediction_heads
from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve

HEADS = {"mtp.layers.0.mlp.weight": torch.randn(4, 4, dtype=torch.bfloat16), "mtp.norm.weight": torch.randn(4)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = checkpoint(tmp_path / "base", like="qwen3_5-tiny", vocab_size=4096)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **HEADS}, path, metadata={"format": "pt"})
    return folder


def test_which_tensors_these_are() -> None:
    names = ["mtp.fc.weight", "model.mtp_layers.0.x", "model.layers.61.mlp.weight", "model.layers.60.mlp.weight"]
    assert prediction_heads([*names, "lm_head.weight", "model.smtp.weight"], 61) == names[:3]


def test_the_plan_names_them(base: Path) -> None:
    facts = read_model_facts(section(base))
    config = RunConfig.model_validate(
        {"model": {"name_or_path": str(base)}, "data": {"train": "x"}, "training": {"output_dir": "x"}}
    )
    (said,) = [one for one in resolve(config, lookup("cpu"), facts).warnings if "multi-token prediction" in one]
    assert "mtp." in said


def test_the_plan_says_that_a_quantised_checkpoint_loses_them(base: Path) -> None:
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "fp8"}}))
    config = RunConfig.model_validate(
        {"model": {"name_or_path": str(base)}, "data": {"train": "x"}, "training": {"output_dir": "x"}}
    )
    plan = resolve(config, lookup("h100"), read_model_facts(section(base)))
    (said,) = [one for one in plan.warnings if "multi-token prediction" in one]
    assert "left out" in said
    assert "fp8" in said


@pytest.mark.parametrize(("adapter", "quantization"), [("none", "none"), ("lora", "none"), ("lora", "nf4")])
def test_a_result_holds_them_as_they_came(base: Path, tmp_path: Path, adapter: str, quantization: str) -> None:
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    model = {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny", "quantization": quantization}
    run = open_run(str(finished_run(tmp_path / "run", base, adapter=adapter, model=model)))
    export_run(run, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(base / "model.safetensors").keys()
    for name, tensor in HEADS.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor)
