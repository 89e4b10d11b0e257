"""Weights left in their files: whoever reads them afterwards, whole or by rows, gets what loading gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, plan, section
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    core_model_loading,
)

from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.files.architectures import no_progress_bars
from halftune.model.load.lazy_weights import CPU, LazyWeights, why_not
from halftune.model.load.load import load_model
from halftune.model.load.zero_weights import insert_zero_weights, remove_zero_weights

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
    elif kind == "falcon":  # the whole model computes a buffer of each layer
        mixer = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
        model = FalconH1ForCausalLM(FalconH1Config(**SMALL, **mixer, ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9]))
    else:
        return checkpoint(folder, torch.bfloat16, kind)
    for buffer in model.buffers():
        buffer += 0.25
    with no_progress_bars():
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.parametrize("kind", ["qwen3_5-tiny", "mixtral", "deepseek", "falcon"])
def test_rows_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    made = plan("fp32", keep=(r"A_log$",))
    folder = section(written(kind, tmp_path / "model"))
    lazy = LazyWeights()
    model, loaded = load_model(folder, made, lazy=lazy), load_model(folder, made)
    assert lazy.lacks(model) == ""
    assert all(one.is_meta for one in model.parameters())
    theirs = dict(loaded.named_parameters())
    with lazy.opened():
        for name, weight in model.named_parameters():
            half = weight.shape[0] // 2
            assert weight.dtype == theirs[name].dtype
            whole = lazy.read(name, torch.empty_like(weight, device=CPU))
            rows = lazy.read(name, torch.empty_like(whole[half:]), half)
            assert torch.equal(whole, theirs[name])
            assert torch.equal(rows, theirs[name][half:])
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in loaded.named_buffers())


def test_adapters_have_their_numbers_beside_weights_without() -> None:
    adapter = LoraAdapter(rank=2, target_modules="all-linear", modules_to_save=("embed_tokens", "lm_head"))
    made, folder = plan("bf16"), section("builtin:llama-tiny")
    lazy = LazyWeights()
    model = load_model(folder, made, lazy=lazy)
    there = insert_zero_weights(model)
    adapted = attach_adapter(model, adapter, made, 3)
    remove_zero_weights(adapted, there, lazy)
    whole = attach_adapter(load_model(folder, made), adapter, made, 3)
    assert lazy.lacks(adapted) == ""
    own, theirs = dict(adapted.named_parameters()), dict(whole.named_parameters())
    assert own.keys() == theirs.keys()
    with lazy.opened():
        for name, weight in own.items():
            other = theirs[name]
            assert (weight.dtype, weight.requires_grad) == (other.dtype, other.requires_grad), name
            assert weight.is_meta != (".lora_" in name), name
            assert torch.equal(
                lazy.read(name, torch.empty_like(weight, device=CPU)) if weight.is_meta else weight, other
            )


def test_a_weight_under_another_name_is_told() -> None:
    lazy = LazyWeights()
    model = load_model(section("builtin:llama-tiny"), plan("bf16"), lazy=lazy)
    model.register_parameter("extra", torch.nn.Parameter(torch.empty(3, device="meta")))
    assert lazy.lacks(model) == "extra"


def test_experts_of_other_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, read = LazyWeights(), []
    model = load_model(section(written("mixtral", tmp_path / "model")), plan("fp32"), lazy=lazy)
    add = core_model_loading.WeightTransform.add_tensor
    monkeypatch.setattr(
        core_model_loading.WeightTransform, "add_tensor", lambda self, *rest: read.append(rest[1]) or add(self, *rest)
    )
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with lazy.opened():
        lazy.read(name, torch.empty_like(model.get_parameter(name)[1:], device=CPU), 1)
    expert = "model.layers.1.block_sparse_moe.experts"
    assert sorted(read) == [f"{expert}.{number}.{which}.weight" for number in (1, 2) for which in ("w1", "w3")]


def test_of_two_tensors_for_one_weight_the_same_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["model.norm.weight"] + 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    lazy = LazyWeights()
    load_model(section(folder), plan(), lazy=lazy)
    theirs = load_model(section(folder), plan()).get_parameter("model.norm.weight")
    with lazy.opened():
        assert torch.equal(lazy.read("model.norm.weight", torch.empty_like(theirs)), theirs)


def test_files_that_were_written_anew_are_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    lazy = LazyWeights()
    model = load_model(section(folder), plan(), lazy=lazy)
    checkpoint(folder, intermediate_size=40)
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(ModelError, match=r"gate_proj.weight changed from \(48, 32\) to \(40, 32\)"), lazy.opened():
        lazy.read(name, torch.empty_like(model.get_parameter(name), device=CPU))


def test_another_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() == ""
    with monkeypatch.context() as patch:
        patch.setattr(core_model_loading.WeightTransform, "add_tensor", lambda self, tensor: None)
        assert why_not().endswith("signature of core_model_loading.WeightTransform.add_tensor")
    monkeypatch.delattr(core_model_loading, "WeightConverter")
    assert why_not().endswith("has no core_model_loading.WeightConverter.convert")
