"""Memory of towers: the estimate against the peaks of the towers themselves, and what the plan makes of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen2_5OmniThinkerForConditionalGeneration

from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.run import RunConfig
from halftune.hardware.catalogue import lookup
from halftune.hardware.tower_memory import patches_per_token, tower_memory, tower_weights
from halftune.model.files.architectures import multimodal_auto
from halftune.plan import resolve

BASE = {
    "model": {"name_or_path": "builtin:qwen2_5_vl-tiny"},
    "data": {"train": "builtin:patterns", "images": True, "max_length": 128},
    "training": {"output_dir": "run"},
}
TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
VIT = {
    "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 5, "num_attention_heads": 4, "image_size": 280,
    "patch_size": 14,
}  # fmt: skip
# kind: config, inputs of the tower, tokens, kind of media
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "qwen2_5_vl": (
        {"text_config": ROPE, "vision_config": {
            "depth": 5, "num_heads": 4, "patch_size": 14, "intermediate_size": 342, "hidden_size": 128,
            "out_hidden_size": 32, "window_size": 112, "fullatt_block_indexes": [4]}},
        {"pixel_values": (2 * 20 * 32, 3 * 2 * 14 * 14), "image_grid_thw": [[1, 20, 32], [1, 20, 32]]}, 320, "image",
    ),
    "gemma3": (
        {"text_config": TEXT, "mm_tokens_per_image": 100, "vision_config": VIT},
        {"pixel_values": (3, 3, 280, 280)}, 300, "image",
    ),
    "llava": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_feature_layer": -2,
         "vision_config": {**VIT, "model_type": "clip_vision_model"}},
        {"pixel_values": (3, 3, 280, 280)}, 1200, "image",
    ),
    "lfm2_vl": (
        {"text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["full_attention"]}, "projector_hidden_size": 96,
         "vision_config": {**VIT, "model_type": "siglip2_vision_model", "num_patches": 400, "vision_use_head": False}},
        {"pixel_values": (3, 400, 588), "spatial_shapes": [[20, 20]] * 3, "pixel_attention_mask": [[1] * 400] * 3},
        300, "image",
    ),
    "llama4": (
        {"text_config": {**TEXT, "num_local_experts": 2}, "vision_config": {
            **VIT, "intermediate_size": 512, "projector_input_dim": 160, "projector_output_dim": 160,
            "vision_output_dim": 160}},
        {"pixel_values": (3, 3, 280, 280)}, 300, "image",
    ),
    "gemma4_unified": (
        {"text_config": {**TEXT, "global_head_dim": 16, "layer_types": ["full_attention"]}, "audio_config": None,
         "vision_config": {"patch_size": 7, "pooling_kernel_size": 2, "mm_embed_dim": 128, "output_proj_dims": 128}},
        {"pixel_values": (3, 100, 588), "image_position_ids": [[[i, j] for i in range(10) for j in range(10)]] * 3},
        300, "image",
    ),
    "qwen2_5_omni_thinker": (
        {"text_config": ROPE, "vision_config": {"depth": 1, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 32},
         "audio_config": {"d_model": 128, "encoder_layers": 5, "encoder_attention_heads": 4, "encoder_ffn_dim": 448,
                          "output_dim": 32, "num_mel_bins": 80, "n_window": 50}},
        {"input_features": (2, 80, 1600), "feature_attention_mask": [[1] * 1600] * 2}, 800, "audio",
    ),
    "voxtral": (
        {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": {
            "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_mel_bins": 80, "max_source_positions": 800}},
        {"input_features": (2, 80, 1600)}, 400, "audio",
    ),
}  # fmt: skip
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration", "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration", "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
}  # fmt: skip
ADAPTED = r".*(visual|tower|vision_model)[.].*[.]([qkv]_proj|out_proj|qkv|fc1|fc2|(gate|up|down)_proj|attn.proj)"


@cache
def facts_of(kind: str) -> ModelFacts:
    raw = {**AutoConfig.for_model(kind, **TOWERS[kind][0]).to_dict(), "architectures": [CLASSES[kind]]}
    return facts_from_config(raw, kind, multimodal=CLASSES[kind])


def config(**changes: dict) -> RunConfig:
    return RunConfig.model_validate({name: {**BASE.get(name, {}), **changes.get(name, {})} for name in BASE | changes})


def tower(kind: str, mode: str, *, checkpointing: bool) -> Any:
    """The model, of whose tower nothing is trained, or everything."""
    built: Any = AutoConfig.for_model(kind, **TOWERS[kind][0])
    if kind == "qwen2_5_omni_thinker":
        model: Any = Qwen2_5OmniThinkerForConditionalGeneration._from_config(built, dtype=torch.float32)
    else:
        model = multimodal_auto(built).from_config(built, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    model.requires_grad_(mode == "full").train()
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=ADAPTED)).get_base_model()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for one in model.parameters():
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    return model


def most_bytes(model: Any, given: dict[str, Any], *, backward: bool) -> tuple[int, int]:
    """Bytes after the forward pass of a tower, and the most, both over those before it."""

    def features() -> torch.Tensor:
        if "feature_attention_mask" in given:
            return model.get_audio_features(**given).last_hidden_state
        if "input_features" in given:
            return model.get_audio_features(**given).pooler_output
        made = model.get_image_features(**given)
        made = made.last_hidden_state if made.pooler_output is None else made.pooler_output  # Llama 4 projects it later
        return made if isinstance(made, torch.Tensor) else torch.cat(list(made))

    def live(seen: Any) -> tuple[int, int]:
        now = most = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        return now, most

    features()  # makes what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = features()
    held, most = live(seen)
    if backward:
        del out
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            out = features()
            out.backward(torch.ones_like(out))
        most = max(most, live(seen)[1])
    return held, most


CASES = [("frozen", False), ("lora", False), ("full", False), ("full", True)]
DAILY = {("qwen2_5_vl", "frozen"), ("qwen2_5_omni_thinker", "lora"), ("gemma3", "full")}


@pytest.mark.parametrize(
    ("kind", "mode", "checkpointing"),
    [
        pytest.param(kind, *case, marks=() if (kind, case[0]) in DAILY else pytest.mark.nightly)
        for kind in TOWERS
        for case in CASES
        if kind != "gemma4_unified" or case[0] != "lora"  # all of it is the projector
    ],
)
def test_the_estimate_is_the_peak_of_the_tower(kind: str, mode: str, checkpointing: bool) -> None:
    _, shapes, tokens, medium = TOWERS[kind]
    given = {
        name: torch.randn(shape) if isinstance(shape, tuple) else torch.tensor(shape) for name, shape in shapes.items()
    }
    inputs = sum(one.nbytes for one in given.values() if one.is_floating_point())
    found = tower_memory(facts_of(kind), tokens, 4, (medium,), mode=mode, checkpointing=checkpointing)
    held, most = most_bytes(tower(kind, mode, checkpointing=checkpointing), given, backward=mode != "frozen")
    assert found.held == pytest.approx(inputs + held, rel=0.1)
    assert found.peak == pytest.approx(inputs + most, rel=0.1)


def test_activations_grow_with_tokens_and_layers_that_are_trained() -> None:
    facts = read_model_facts(config().model)
    assert patches_per_token(facts) == 4

    def bytes_of(tokens: int, mode: str, *, checkpointing: bool = False) -> int:
        return tower_memory(facts, tokens, 4, ("image",), mode=mode, checkpointing=checkpointing).peak

    assert bytes_of(2000, "frozen") == pytest.approx(2 * bytes_of(1000, "frozen"), rel=1e-6)
    assert bytes_of(1000, "frozen") < bytes_of(1000, "projector") < bytes_of(1000, "lora") < bytes_of(1000, "full")
    deep = tuple(replace(one, layers=tuple(range(24))) if one.layers else one for one in facts.tower_tensors)
    facts = replace(facts, tower_tensors=deep)
    assert bytes_of(1000, "full") > 2 * bytes_of(1000, "full", checkpointing=True)


def test_the_plan_counts_towers_of_runs_with_images() -> None:
    facts = read_model_facts(config().model)
    seeing = resolve(config(), lookup("a100"), facts).memory
    text = resolve(config(data={"train": "builtin:python-docs", "images": False}), lookup("a100"), facts).memory
    trained = resolve(config(model={"train": {"vision": "lora"}}), lookup("a100"), facts).memory
    width = 2  # bytes of bf16
    assert seeing.weights - text.weights == facts.tower_parameters * width
    assert text.activations < seeing.activations < trained.activations
    assert trained.optimizer > seeing.optimizer
    without = tower_memory(replace(facts, tower_tensors=()), 10, 4, ("image",), mode="full", checkpointing=False)
    assert without.peak == without.held == 0


def test_fsdp2_gathers_two_layers_of_a_tower_at_a_time() -> None:
    facts = facts_of("qwen2_5_vl")
    layer = sum(one.size for one in facts.tower_tensors if one.name.startswith("model.visual.blocks.*."))
    assert tower_weights(facts, 4) == -(-facts.tower_parameters // 4) + facts.tower_parameters - 3 * layer
    assert tower_weights(facts, 4, offload=True) == facts.tower_parameters - 3 * layer
    assert tower_weights(facts, 4, offload=True, regather=False) == tower_weights(facts, 1) == facts.tower_parameters
    facts, shared = read_model_facts(config().model), {"distributed": {"strategy": "fsdp2", "num_processes": 4}}
    text = {"data": {"train": "builtin:python-docs", "images": False}}
    seeing, plain = (resolve(config(**shared, **more), lookup("a100"), facts, world_size=4) for more in ({}, text))
    assert seeing.memory.weights - plain.memory.weights == 2 * tower_weights(facts, 4)


def test_a_frozen_tower_and_the_language_model_do_not_peak_together() -> None:
    """Then the larger of the two counts, with the pixels and features that exist in both."""
    facts, run = read_model_facts(config().model), config(data={"max_length": 2048})
    plain = config(data={"train": "builtin:python-docs", "images": False, "max_length": 2048})
    text = resolve(plain, lookup("a100"), facts).memory
    made = resolve(run, lookup("a100"), facts)
    tokens = made.batch.micro_batch * 2048
    own = tower_memory(facts, tokens, 2, ("image",), mode="frozen", checkpointing=False)
    assert own.held < own.peak
    assert made.memory.activations == max(text.activations + own.held, own.peak - made.memory.logits)
