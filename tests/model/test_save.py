"""What is saved: the planned dtype, config.json agreeing, safetensors only, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import checkpoint, plan, section
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import TrainingError
from halftune.model.adapters import attach_adapter, load_adapter
from halftune.model.load.load import load_model
from halftune.model.result import save
from halftune.model.result.merge import merge_adapter
from halftune.model.result.save import save_final, write_model
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.precision.report import check_dtypes

IDS = torch.arange(20).reshape(2, 10)
LORA, FULL = LoraAdapter(rank=4), NoAdapter(type="none")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(section("builtin:qwen2-tiny"))


def run_result(folder: Path, adapter: LoraAdapter | NoAdapter, made):
    """A model as training leaves it: trained weights moved by numbers that half formats round."""
    model = attach_adapter(load_model(section(folder), made), adapter, made, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def test_an_adapter_round_trips_in_pefts_format(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model"), plan("fp32", "fp32")
    model = run_result(folder, LORA, made)
    save_final(model, tokenizer, made, tmp_path / "final")
    names = sorted(file.name for file in (tmp_path / "final").iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(names)
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    config = json.loads((tmp_path / "final" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False, "saving in the middle of training changes nothing"
    again = load_adapter(load_model(section(folder), made, for_training=False), tmp_path / "final", made)
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_adapters_that_did_not_move_are_named(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model"), plan("fp32", "fp32")
    model = run_result(folder, LORA, made)
    assert save_final(model, tokenizer, made, tmp_path / "final") == []
    still = "model.layers.1.mlp.up_proj"
    model.get_submodule(f"base_model.model.{still}").lora_B.default.weight.data.zero_()
    assert save_final(model, tokenizer, made, tmp_path / "final") == [f"base_model.model.{still}"]


def test_an_adapter_without_all_trained_weights_is_not_saved(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan("fp32", "fp32")
    model, whole = run_result(checkpoint(tmp_path / "model"), LORA, made), save.get_peft_model_state_dict

    def without_one(*given: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = whole(*given, **options)
        found.pop(next(iter(found)))
        return found

    monkeypatch.setattr(save, "get_peft_model_state_dict", without_one)
    with pytest.raises(TrainingError) as refused:
        save_final(model, tokenizer, made, tmp_path / "final")
    assert refused.value.code == "train.adapter_incomplete"
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("saved", ["fp32", "bf16"])
def test_an_adapter_has_the_saved_dtype(tmp_path: Path, tokenizer, saved: str) -> None:
    made = plan("bf16", "fp32", saved=saved)
    save_final(run_result(checkpoint(tmp_path / "model"), LORA, made), tokenizer, made, tmp_path / "final")
    tensors = load_file(tmp_path / "final" / "adapter_model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.float32 if saved == "fp32" else torch.bfloat16}


@pytest.mark.parametrize("like", ["qwen2-tiny", "llama-tiny", "qwen3_5-tiny"])
def test_a_full_model_in_bf16_loads_with_transformers_alone(tmp_path: Path, tokenizer, like: str) -> None:
    keep = (r"(^|\.)A_log$",)
    made = plan("fp32", "fp32", saved="bf16", keep=keep)
    model = run_result(checkpoint(tmp_path / "model", like=like), FULL, made)
    save_final(model, tokenizer, made, tmp_path / "final")
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert "halftune" not in json.dumps(config)
    for name, tensor in load_file(tmp_path / "final" / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if "A_log" in name else torch.bfloat16), name
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert alone.get_input_embeddings().weight.dtype == torch.bfloat16
    tied = bool(model.config.tie_word_embeddings)
    assert (alone.lm_head.weight is alone.get_input_embeddings().weight) is tied
    for (name, here), (_, there) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(here.detach().bfloat16(), there.detach().bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == tokenizer.chat_template


def test_a_tied_head_is_written_once(tmp_path: Path, tokenizer) -> None:
    made = plan("fp32", "fp32", saved="bf16")
    save_final(run_result(checkpoint(tmp_path / "model"), FULL, made), tokenizer, made, tmp_path / "final")
    assert "lm_head.weight" not in load_file(tmp_path / "final" / "model.safetensors")


def test_saved_embeddings_of_an_adapter_round_trip(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model"), plan("fp32", "fp32")
    model = run_result(folder, LoraAdapter(rank=4, modules_to_save=("embed_tokens",)), made)
    save_final(model, tokenizer, made, tmp_path / "final")
    again = load_adapter(load_model(section(folder), made, for_training=False), tmp_path / "final", made)
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_an_older_result_is_replaced_whole(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model"), plan()
    save_final(run_result(folder, FULL, made), tokenizer, made, tmp_path / "final")
    save_final(run_result(folder, LORA, made), tokenizer, made, tmp_path / "final")
    assert not (tmp_path / "final" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "model"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model"), plan()
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot write the result"):
        save_final(run_result(folder, LORA, made), tokenizer, made, tmp_path / "file" / "final")
    assert os.listdir(tmp_path / "model")


def test_a_head_of_its_own_is_named_in_the_saved_config(tmp_path: Path, tokenizer) -> None:
    folder, made = checkpoint(tmp_path / "model", tie_word_embeddings=False), plan()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = run_result(folder, FULL, made)
    save_final(model, tokenizer, made, tmp_path / "final")
    assert json.loads((tmp_path / "final" / "config.json").read_text())["tie_word_embeddings"] is False
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def ernie(folder: Path) -> Path:
    """A mixture whose code keeps routers (parameters) and their statistics in fp32, also in bf16."""
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        vocab_size=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapter", [FULL, LORA])
def test_what_the_models_own_code_keeps_is_saved_and_merged_in_fp32(tmp_path: Path, tokenizer, adapter) -> None:
    folder = ernie(tmp_path / "model")
    made = plan("fp32" if adapter is FULL else "bf16", "fp32", saved="bf16")
    model = run_result(folder, adapter, made)
    check_dtypes(model, made.precision)
    save_final(model, tokenizer, made, tmp_path / "final")
    if adapter is LORA:
        merged = merge_adapter(section(folder), tmp_path / "final", made, "bf16")
        write_model(merged.model, "bf16", (), tmp_path / "merged")
        saved = load_file(tmp_path / "merged" / "model.safetensors")
    else:
        saved = load_file(tmp_path / "final" / "model.safetensors")
    kept = {name for name, tensor in saved.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in saved if name.endswith("gate.weight") or "moe_statics" in name}
    assert len(kept) == 2
    gate = "model.layers.1.mlp.gate.weight"
    live = model.state_dict()[gate] if adapter is FULL else load_file(folder / "model.safetensors")[gate]
    assert torch.equal(saved[gate], live), "fp32 values arrive unrounded"
