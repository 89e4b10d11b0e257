"""Families that need care: routers as linear layers, fused kernels of mamba, LayerNorm, norms of query and key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from tiny_model import plan, section
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import ConfigError
from halftune.hardware.catalogue import lookup
from halftune.model.adapters import attach_adapter
from halftune.model.adapters.peft_experts import not_loaded_by_peft
from halftune.model.attention.register import current_guard
from halftune.model.files.architectures import no_progress_bars
from halftune.model.load.load import load_model
from halftune.model.result.merge import merge_adapter
from halftune.model.result.save import save_final
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import is_tied
from halftune.plan import resolve
from halftune.precision.dtypes import autocast
from halftune.precision.report import check_dtypes

IDS = torch.arange(20).reshape(2, 10)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama4_text": {**SMALL, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 48},
    "granitemoe": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**SMALL, **MAMBA},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "qwen3": {**SMALL, "head_dim": 16},
    "laguna": {
        **SMALL,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "olmoe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {**SMALL, "head_dim": 16},
    "phi": {**SMALL, "qk_layernorm": True},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "vocab_size": 256,
    },
}


def model_of(kind: str, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind])).save_pretrained(folder)
    return folder


def step(model: Any, made: Any) -> None:
    with autocast(made.precision, torch.device("cpu")):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel())


@pytest.mark.parametrize(
    ("kind", "left_out"), [("llama4_text", "router"), ("granitemoe", "router"), ("falcon_h1", "out_proj")]
)
def test_all_linear_leaves_out_what_cannot_be_adapted(tmp_path: Path, kind: str, left_out: str) -> None:
    model = attach_adapter(load_model(section(model_of(kind, tmp_path)), plan()), LoraAdapter(rank=2), plan(), 0)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert left_out not in adapted
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= adapted
    step(model, plan())


def test_what_peft_refuses_is_an_error_with_its_words(tmp_path: Path) -> None:
    loaded = load_model(section(model_of("falcon_h1", tmp_path)), plan())
    with pytest.raises(ConfigError, match=r"adapter: rejected by peft: .*out_proj.*incompatible with Mamba"):
        attach_adapter(loaded, LoraAdapter(target_modules=("out_proj",)), plan(), 0)


@pytest.mark.parametrize(("kind", "embedding"), [("gpt2", "wte"), ("opt", "embed_tokens")])
def test_a_saved_embedding_goes_on_in_the_storage_dtype(tmp_path: Path, kind: str, embedding: str) -> None:
    made = plan("bf16", "fp32")
    adapter = LoraAdapter(rank=2, modules_to_save=(embedding,))
    model: Any = attach_adapter(load_model(section(model_of(kind, tmp_path)), made), adapter, made, 0)
    check_dtypes(model, made.precision)
    assert model.get_input_embeddings().weight.dtype == torch.float32
    assert model.get_input_embeddings()(IDS).dtype == torch.bfloat16
    step(model, made)


@pytest.mark.parametrize("saved", ["wte", "lm_head"])
def test_a_tied_embedding_of_another_name_stays_tied_in_the_merged_model(tmp_path: Path, saved: str) -> None:
    folder, made = model_of("gpt2", tmp_path / "base"), plan()
    adapter = LoraAdapter(rank=2, modules_to_save=(saved,))
    model: Any = attach_adapter(load_model(section(folder), made), adapter, made, 0)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.1)
    trained = model.get_input_embeddings().weight.detach().clone()
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    merged = merge_adapter(section(folder), tmp_path / "final", made, "fp32").model
    assert is_tied(merged)
    assert torch.equal(merged.get_output_embeddings().weight, trained)


@pytest.mark.parametrize("adapter", [NoAdapter(type="none"), LoraAdapter(rank=2)])
@pytest.mark.parametrize("kind", ["qwen3", "olmoe", "cohere2", "phi"])
def test_norms_of_query_and_key_do_not_promote_them(tmp_path: Path, kind: str, adapter: Any) -> None:
    full = isinstance(adapter, NoAdapter)
    half = plan("bf16", "fp32")
    storage = plan("fp32").precision.storage if full else half.precision.storage
    made = replace(
        half, precision=replace(half.precision, storage=storage), attention=replace(half.attention, guard="strict")
    )
    model = attach_adapter(load_model(section(model_of(kind, tmp_path)), made), adapter, made, 0)
    check_dtypes(model, made.precision)
    model.train()
    step(model, made)
    assert current_guard().report()["casts"] == 0


@pytest.mark.parametrize("adapter", [NoAdapter(type="none"), LoraAdapter(rank=2)])
def test_a_model_without_attention_is_planned_loaded_and_trained(tmp_path: Path, adapter: Any) -> None:
    folder = model_of("mamba2", tmp_path)
    recipe = {"model": {"name_or_path": str(folder)}, "adapter": adapter.model_dump(), "data": {"train": "gone.jsonl"}}
    config = RunConfig.model_validate({**recipe, "training": {"output_dir": str(tmp_path / "run")}})
    made = resolve(config, lookup("cpu-zen4"), read_model_facts(config.model))
    assert "no layer of mamba2 has softmax attention" in made.attention.softmax.reason
    model = attach_adapter(load_model(config.model, made), config.adapter, made, 0)
    check_dtypes(model, made.precision)
    step(model, made)


@pytest.mark.parametrize(("kind", "whole"), [("laguna", False), ("olmoe", True), ("qwen3", True)])
def test_tensors_that_peft_would_leave_out_are_known(tmp_path: Path, kind: str, whole: bool) -> None:
    model: Any = attach_adapter(load_model(section(model_of(kind, tmp_path)), plan()), LoraAdapter(rank=2), plan(), 0)
    stored = {name: torch.ones_like(tensor) for name, tensor in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(model, stored)
    left_out = [name for name, tensor in get_peft_model_state_dict(model).items() if not tensor.eq(1).all()]
    assert not_loaded_by_peft(model) == sorted(left_out)
    assert whole == (not left_out)
