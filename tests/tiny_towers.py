"""Tiny multimodal checkpoints: a language model with a vision tower, random weights, no tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tiny_model import SIZES
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, initialization

from halftune.certify.small_model import default_config, small_config
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.model.files.architectures import no_progress_bars

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_LLAMA = {**BUILTIN_MODELS["llama-tiny"], **SIZES["llama-tiny"], "vocab_size": 256}
_QWEN3_5 = {**BUILTIN_MODELS["qwen3_5-tiny"], **SIZES["qwen3_5-tiny"], "vocab_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": _QWEN3_5,
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "patch_size": 4,
                          "out_hidden_size": 32, "num_position_embeddings": 16},
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "text_config": {**_LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_key_value_heads": 1},
        "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 1,
        "tie_word_embeddings": True,
    },
    "llava": {
        "text_config": _LLAMA,
        "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    },
    "qwen2_5_vl": {
        "text_config": {**_LLAMA, "model_type": "qwen2_5_vl_text", "head_dim": 16, "num_key_value_heads": 2,
                        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "patch_size": 4,
                          "out_hidden_size": 32},
    },
}  # fmt: skip


# Their default config is not one that transformers can build here (timm, scipy, values that contradict each other), or
# one whose layers all differ, which the small copy does not know how to shorten.
NOT_SMALL = {
    *("aya_vision", "chameleon", "cohere_compass", "deepseek_ocr2", "dots3_note", "emu3", "fast_vlm", "gemma3n"),
    *("granite4_vision", "hunyuan_vl", "inkling_mm_model", "muse_spark", "perception_lm", "qwen4_exp"),
    *("mistral_large4", "molmo2"),
}
# More than 190 million weights even so; qwen2_5_vl is one of MODELS.
LARGE = {
    *("exaone4_5", "hyperclovax_vision_v2", "idefics2", "minimax_m3_vl", "qwen2_5_omni_thinker", "qwen2_5_vl"),
    "step3p7",
}


def multimodal(folder: Path, kind: str = "qwen3_5", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes a random checkpoint of hidden size 32: the language model in ``dtype``, its towers in fp32."""
    for_ids = dict.fromkeys(("image_token_id", "image_token_index", "video_token_id"), 250)
    config = AutoConfig.for_model(kind, **copy.deepcopy(MODELS[kind]), **for_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        language = model.get_decoder()
        for parameter in model.parameters():
            parameter.data += 1e-4 * torch.randn(parameter.shape)
        for part in (language, model.get_output_embeddings()):
            for parameter in part.parameters():
                parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    with no_progress_bars():
        model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "a"}\n')
    return folder


def few_layers(kind: str) -> PretrainedConfig:
    """The default config of a model type with a small language model, and towers of few layers and their own widths."""
    return small_config(default_config(kind))


def random_checkpoint(folder: Path, config: PretrainedConfig) -> Path:
    """Writes a checkpoint of random numbers in bf16."""
    with torch.random.fork_rng(devices=[]), initialization.no_init_weights():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
    with no_progress_bars():
        model.save_pretrained(folder)
    return folder
