"""Inputs of traced models: token ids, and images and audio for models with towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

ROWS, TOKENS = 2, 32
_OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
_QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v")


def inputs_for(config: PretrainedConfig, *, images: bool = True) -> dict[str, Any]:
    """Return arguments of a training forward: ``input_ids`` ``[2, 32]`` or longer, and inputs of the family's towers.

    Integers are real; floating inputs are fp32, as processors make them, and fake inside ``FakeTensors``.

    Args:
        config: of the model.
        images: whether the run trains on images or audio; Qwen-Omni's towers are always traced.
    """
    make = _MAKERS.get(config.model_type, _text)
    return make(config) if images or make is _qwen_omni else _text(config)


def untraced_towers(config: PretrainedConfig, *, images: bool) -> str:
    """Why the towers of a model are not traced, as a clause; empty if they are, or if it has none."""
    towers = [name for name in ("vision_config", "audio_config") if vars(config).get(name) is not None]
    if not towers or config.model_type in _OMNI:
        return ""
    if not images:
        return "the run has no images or audio"
    return "" if config.model_type in _MAKERS else "the inputs of its towers are unknown"


def _text(config: PretrainedConfig) -> dict[str, Any]:
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return {"input_ids": torch.arange(ROWS * TOKENS).remainder(min(vocabulary, 50)).reshape(ROWS, TOKENS)}


def _qwen_omni(config: PretrainedConfig) -> dict[str, Any]:
    """One row with an image of 4 × 4 patches and two seconds of audio."""
    vision, audio = config.vision_config, config.audio_config
    merged = 16 // vision.spatial_merge_size**2
    frames = 200
    heard = 26 if config.model_type == "qwen3_omni_moe_thinker" else _heard(frames)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    named, text = config.to_dict(), _plain_ids(config)
    edges = [named.get(f"{kind}_{end}_token_id") or 5 for kind in ("vision", "audio") for end in ("start", "end")]
    picture, sound = [config.image_token_id] * merged, [config.audio_token_id] * heard
    ids = [text[0], edges[0], *picture, edges[1], text[1], edges[2], *sound, edges[3], *text[2:]]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "pixel_values": torch.randn(16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "input_features": torch.randn(1, audio.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
    }


def _heard(frames: int) -> int:
    """Placeholders of a sound: a convolution and a pooling halve its frames (``_get_feat_extract_output_lengths``)."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _plain_ids(config: PretrainedConfig) -> list[int]:
    """16 ids of text: none is a placeholder."""
    named = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
    placeholders = {value for value in named if isinstance(value, int)}  # some have lists: tokens that end an answer
    return [one for one in range(80) if one not in placeholders][:16]


def _qwen_vl(config: PretrainedConfig) -> dict[str, Any]:
    """One row with an image of 4 × 4 patches."""
    vision = config.vision_config
    merged, picture = 16 // vision.spatial_merge_size**2, config.image_token_id
    named = config.to_dict()
    edges = [named.get(name) or 5 for name in ("vision_start_token_id", "vision_end_token_id")]
    text = _plain_ids(config)
    ids = torch.tensor([[text[0], edges[0], *[picture] * merged, edges[1], *text[1:]]])
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == picture).long(),
        "pixel_values": torch.randn(16, patch),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _qwen_audio(config: PretrainedConfig) -> dict[str, Any]:
    """One row with a sound of the extractor's full length."""
    frames = 2 * config.audio_config.max_source_positions
    return _sound(config, frames, _heard(frames), "feature_attention_mask")


def _qwen_asr(config: PretrainedConfig) -> dict[str, Any]:
    """One row with two seconds of audio."""
    return _sound(config, 200, 26, "input_features_mask")


def _glm_asr(config: PretrainedConfig) -> dict[str, Any]:
    """One row with a sound of the extractor's full length."""
    positions = config.audio_config.max_position_embeddings
    return _sound(config, 2 * positions, positions // 4, "input_features_mask")


def _voxtral(config: PretrainedConfig) -> dict[str, Any]:
    """One row with a sound of one window, which has no mask."""
    audio = config.audio_config
    positions = audio.max_source_positions
    made = _sound(config, 2 * positions, positions * audio.hidden_size // audio.intermediate_size, "")
    return {name: one for name, one in made.items() if name}


def _sound(config: PretrainedConfig, frames: int, heard: int, mask: str) -> dict[str, Any]:
    text = _plain_ids(config)
    ids = torch.tensor([[text[0], *[config.audio_token_id] * heard, *text[1:]]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(1, config.audio_config.num_mel_bins, frames),
        mask: torch.ones(1, frames, dtype=torch.long),
    }


_MAKERS: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    **dict.fromkeys(_OMNI, _qwen_omni),
    "qwen2_audio": _qwen_audio,
    "qwen3_asr": _qwen_asr,
    "glmasr": _glm_asr,
    "voxtral": _voxtral,
    **dict.fromkeys(_QWEN_VL, _qwen_vl),
}
