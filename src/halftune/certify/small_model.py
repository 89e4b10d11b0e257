"""A checkpoint of a model's own class with few narrow layers and random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from halftune.config.builtin_models import VOCAB_SIZE
from halftune.config.sections.model import ModelSection
from halftune.model.attention.packing_check import VOCABULARY, randomise, shrunk_config
from halftune.model.files.architectures import no_progress_bars
from halftune.model.load.towers import text_config_name
from halftune.model.meta.model import build
from halftune.plan import Plan

_FIRST_ID = 100  # no special token
_WIDE, _NARROW = ("intermediate_size", "ffn_dim", "vocab_size"), 128
_DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layers", "layers")
_WIDTH_OF_TEXT = ("out_hidden_size", "text_hidden_size")
_MERGING = ("voxtral_encoder", "glmasr_encoder")  # positions of one token are as wide as the feed-forward layer
_SEEN = ("image", "video", "audio", "vision")
# What published checkpoints say, where the code contradicts the default values or these are no whole model.
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_SAID: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v", "glmga"), _HALF),
    "glm4v_moe": {"head_dim": 128},
    "glm5_next": {"linear_num_heads": 2},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention" if n % 8 else "full_attention" for n in range(32)]},
    **{key: {"head_dim": 128} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "ministral", "nemotron")},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "qwen3_omni_moe_thinker": {"num_attention_heads": 32, "head_dim": 128},
    "lfm2_moe": {"layer_types": ["full_attention" if n % 4 == 2 else "conv" for n in range(32)]},
}
_SAID_OF_WHOLE = {key: {"vision_start_token_id": 151652} for key in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")}


def write_small_checkpoint(
    config: PretrainedConfig,
    section: ModelSection,
    plan: Plan,
    source: Path | None,
    folder: Path,
    vocabulary: int | None = VOCAB_SIZE,
    first: int = 0,
) -> PreTrainedModel:
    """Write a small fp32 checkpoint of the class that halftune loads, without a tokenizer.

    Args:
        config: of the whole model.
        section: names the model; its code builds the copy.
        plan: for the CPU in fp32; tells whether the class has towers.
        source: folder of the model, whose Python files are copied; None for builtin models.
        folder: where to write.
        vocabulary: entries of the embedding; None: as many as the model has, so that its own tokenizer fits.
        first: number of the first layers that all stay.

    Raises:
        Exception: the model's code does not support such small sizes.
    """
    small = small_config(config, vocabulary, first)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(small, section, plan, "eager")
        model.tie_weights()
        randomise(model.parameters())
        ids_BT = torch.arange(_FIRST_ID, _FIRST_ID + 16).reshape(2, 8)
        model.eval()(input_ids=ids_BT, use_cache=False).logits.sum().backward()
    with no_progress_bars():
        model.save_pretrained(folder)
        type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for code in source.glob("*.py") if source is not None else ():
        shutil.copy(code, folder)
    return model


def default_config(kind: str) -> Any:
    """The config of a model type with its default values, as far as its code runs with them."""
    config, said = CONFIG_MAPPING[kind](), _SAID.get(kind, {})
    text = config.get_text_config(decoder=True)
    if text is config:
        return CONFIG_MAPPING[kind](**said)
    text.update(said)
    config.update(_SAID_OF_WHOLE.get(kind, {}))
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        # the default widths of both do not fit together; Qwen2-VL calls that of the text hidden_size
        for name in (*_WIDTH_OF_TEXT, *["hidden_size"] * (kind == "qwen2_vl")):
            if part is not text and hasattr(part, name):
                setattr(part, name, text.hidden_size)
    return config


def small_config(config: PretrainedConfig, vocabulary: int | None = VOCABULARY, first: int = 0) -> Any:
    """A config with a small language model, and towers of one layer whose widths stay."""
    text = config.get_text_config(decoder=True)
    shorter = _turning(shrunk_config(text, vocabulary=vocabulary or text.vocab_size, first=first))
    small = type(text).from_dict(shorter)
    if text is config:
        return small
    whole = type(config).from_dict(config.to_dict())
    for name in config.sub_configs:
        if (part := vars(whole).get(name)) is None or name == text_config_name(config):
            continue
        values = _shallow(part.to_dict(), layers=1)
        values |= {one: shorter["hidden_size"] for one in _WIDTH_OF_TEXT if one in values}
        if part.model_type in _MERGING:
            values["intermediate_size"] = part.intermediate_size
        setattr(whole, name, type(part).from_dict(values))
    setattr(whole, text_config_name(config), small)
    _shrink_sizes(whole, vocabulary)
    return whole


def _shrink_sizes(whole: PretrainedConfig, vocabulary: int | None) -> None:
    """Make the widths of a config with towers narrow; with a new vocabulary, no token of a text stands for an image."""
    for name, value in list(vars(whole).items()):
        if not isinstance(value, int):
            continue
        if name.endswith(_WIDE):
            setattr(whole, name, _NARROW)
        elif vocabulary is not None and name.startswith(_SEEN) and name.endswith(("_token_id", "_token_index")):
            setattr(whole, name, vocabulary + value)


def _turning(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a text config; of a head as many numbers turn as its positions have sections for."""
    rope = values.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        values["rope_parameters"] = {**rope, "partial_rotary_factor": 2 * sum(sections) / size}
    return values


def _shallow(values: dict[str, Any], layers: int) -> dict[str, Any]:
    """The values of a tower's config with so many layers; of its parts, too."""
    depths = {value for key, value in values.items() if key in _DEPTHS and isinstance(value, int)}
    # labels of classes are numbered
    return {str(key): _shallow_value(str(key), value, layers, depths) for key, value in values.items()}


def _shallow_value(key: str, value: Any, layers: int, depths: set[int]) -> Any:
    """A value of a tower's config with so many layers, which had ``depths``."""
    if isinstance(value, dict):
        return _shallow(value, layers)
    if isinstance(value, list):
        return _shallow_list(key, value, layers, depths)
    if isinstance(value, int) and key in _DEPTHS:
        return layers
    return _NARROW if isinstance(value, int) and key.endswith(_WIDE) else value


def _shallow_list(key: str, value: list[Any], layers: int, depths: set[int]) -> list[Any]:
    if value and all(isinstance(one, int) for one in value):
        return list(range(layers))[: len(value)] if key.endswith(("_indexes", "_indices", "_layers")) else value
    return value[:layers] if len(value) in depths else value
