"""Weights left in their files: whoever reads them afterwards, whole or by rows, gets what loading gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import checkpoint, plan, section
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from halftune.config.adapter import LoraAdapter
from halftune.model.adapters.attach import attach_adapter
from halftune.model.load import load_model
from halftune.model.quiet import quiet
from halftune.model.unread import CPU, Unread, stand_in, take_back

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def written(kind: str, folder: Path) -> Path:
    if kind == "mixtral":  # experts lie apart in the files and are one tensor in the model
        model: Any = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))
    elif kind == "deepseek":  # a buffer in the files; dense and expert layers
        routed = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        shape = SMALL | {"num_key_value_heads": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **routed, **heads))
    else:
        return checkpoint(folder, torch.bfloat16, kind)
    for buffer in model.buffers():
        buffer += 0.25
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.parametrize("kind", ["qwen2-tiny", "llama-tiny", "qwen3_5-tiny", "mixtral", "deepseek"])
def test_rows_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    made = plan("fp32", keep=(r"A_log$",))
    folder = section(written(kind, tmp_path / "model"))
    unread = Unread()
    model, loaded = load_model(folder, made, unread=unread), load_model(folder, made)
    assert unread.lacks(model) == ""
    assert all(one.is_meta for one in model.parameters())
    theirs = dict(loaded.named_parameters())
    with unread.opened():
        for name, weight in model.named_parameters():
            half = weight.shape[0] // 2
            assert weight.dtype == theirs[name].dtype
            whole = unread.read(name, torch.empty_like(weight, device=CPU))
            rows = unread.read(name, torch.empty_like(whole[half:]), half)
            assert torch.equal(whole, theirs[name])
            assert torch.equal(rows, theirs[name][half:])
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in loaded.named_buffers())


def test_adapters_have_their_numbers_beside_weights_without() -> None:
    adapter = LoraAdapter(rank=2, target_modules="all-linear", modules_to_save=("embed_tokens", "lm_head"))
    made, folder = plan("bf16"), section("builtin:llama-tiny")
    unread = Unread()
    lazy = load_model(folder, made, unread=unread)
    there = stand_in(lazy)
    adapted = attach_adapter(lazy, adapter, made, 3)
    take_back(adapted, there, unread)
    whole = attach_adapter(load_model(folder, made), adapter, made, 3)
    assert unread.lacks(adapted) == ""
    own, theirs = dict(adapted.named_parameters()), dict(whole.named_parameters())
    assert own.keys() == theirs.keys()
    with unread.opened():
        for name, weight in own.items():
            other = theirs[name]
            assert (weight.dtype, weight.requires_grad) == (other.dtype, other.requires_grad), name
            assert weight.is_meta != (".lora_" in name), name
            assert torch.equal(
                unread.read(name, torch.empty_like(weight, device=CPU)) if weight.is_meta else weight, other
            )


def test_a_weight_under_another_name_is_told() -> None:
    unread = Unread()
    model = load_model(section("builtin:llama-tiny"), plan("bf16"), unread=unread)
    model.register_parameter("extra", torch.nn.Parameter(torch.empty(3, device="meta")))
    assert unread.lacks(model) == "extra"
