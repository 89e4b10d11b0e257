"""Loading: planned dtypes and nothing but the checkpoint's own weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, plan, section

from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.files.architectures import read_config
from halftune.model.load.load import load_model
from halftune.precision.report import check_dtypes


def test_frozen_weights_in_storage_and_rotary_tables_in_fp32(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    model = load_model(section(folder), plan("bf16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    exact = load_model(section(folder), plan("fp32"))
    assert torch.equal(model.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.training
    assert model.config.use_cache is False
    assert model.name_or_path == str(folder)


def test_what_stays_fp32_comes_unrounded_from_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", like="qwen3_5-tiny")
    made = plan("bf16", keep=(r"(^|\.)A_log$", r"(^|\.)dt_bias$"))
    model = load_model(section(folder), made).requires_grad_(False)
    saved = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.dt_bias"):
        assert torch.equal(model.get_parameter(name), saved[name]), name
        assert not torch.equal(saved[name], saved[name].bfloat16().float()), "the test's numbers need rounding"
    assert model.get_parameter("model.layers.0.linear_attn.conv1d.weight").dtype == torch.bfloat16
    check_dtypes(model, made.precision)


def test_what_the_models_own_code_keeps_fp32_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Qwen2ForCausalLM

    folder, made = checkpoint(tmp_path / "model"), plan("bf16")
    before = Qwen2ForCausalLM._keep_in_fp32_modules_strict
    Qwen2ForCausalLM._keep_in_fp32_modules_strict = ["input_layernorm"]
    try:
        with caplog.at_level(logging.INFO, logger="halftune"):
            model = load_model(section(folder), made, for_training=False)
    finally:
        Qwen2ForCausalLM._keep_in_fp32_modules_strict = before
    assert model.get_parameter("model.layers.0.input_layernorm.weight").dtype == torch.float32
    check_dtypes(model, made.precision)
    assert "model.layers.1.input_layernorm.weight stays fp32" in caplog.text


def test_a_head_of_its_own_is_kept_whatever_the_config_says(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    model = load_model(section(folder), plan())
    assert torch.equal(model.lm_head.weight, stored)
    assert model.config.tie_word_embeddings is False
    for saved in ("lm_head", "embed_tokens"):
        adapter = LoraAdapter(rank=2, modules_to_save=(saved,))
        adapted = attach_adapter(load_model(section(folder), plan()), adapter, plan(), 0)
        assert torch.equal(adapted.get_output_embeddings().weight, stored), saved


def test_for_inference_nothing_requires_a_gradient(tmp_path: Path) -> None:
    model = load_model(section(checkpoint(tmp_path / "model")), plan("bf16"), for_training=False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, first model.layers.1.mlp.up_proj.weight"):
        load_model(section(folder), plan())


def test_weights_of_another_shape_are_an_error(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights have the wrong shape, first model\.norm\.weight"):
        load_model(section(folder), plan())


def test_weights_without_a_place_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path / "model")
    weights = {**load_file(folder / "model.safetensors"), "visual.patch.weight": torch.ones(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="halftune"):
        load_model(section(folder), plan())
    assert "1 unexpected weights: visual.patch.weight" in caplog.text


def test_a_damaged_file_and_an_unknown_architecture(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors: corrupt or truncated .* bytes by the header"):
        load_model(section(folder), plan())
    (folder / "model.safetensors").write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no-such-type"}))
    with pytest.raises(ModelError, match="cannot load the model"):
        load_model(section(folder), plan())


def test_code_of_a_checkpoint_needs_consent(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": auto_map}))
    (folder / "code.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ModelError, match=r"model\.trust_remote_code: true"):
        load_model(section(folder), plan())


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_gradient_checkpointing_leaves_the_gradients_alone(tmp_path: Path, adapter: str) -> None:
    from halftune.config.sections.model import LoraAdapter, NoAdapter
    from halftune.model.adapters import attach_adapter

    folder = checkpoint(tmp_path / "model")
    ids = torch.arange(12)[None]
    gradients = []
    for checkpointing in (False, True):
        made = plan(checkpointing=checkpointing)
        chosen = LoraAdapter(rank=2) if adapter == "lora" else NoAdapter(type="none")
        model = attach_adapter(load_model(section(folder), made), chosen, made, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
        runs = []
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
        layer.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(runs) == (2 if checkpointing else 1)
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert model.training
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients[0].items() if "k_proj.bias" not in name)


@pytest.mark.parametrize("named", ["eager", "flash_attention_2", "someone/kernels", "no such thing"])
def test_attention_named_in_config_json_is_not_used(tmp_path: Path, named: str) -> None:
    """transformers prefers it to its caller's, without a word; one may name code on the hub."""
    folder = checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_attn_implementation": named}))
    model = load_model(section(folder), plan("fp32"))
    assert model.config._attn_implementation.startswith("halftune_")
    assert read_config(folder, trust_remote_code=False)._attn_implementation is None
