"""Reads sizes from config.json, which has several names for most of them."""

from __future__ import annotations

from typing import Any

from halftune.config.facts.architecture import Architecture
from halftune.config.facts.families import Family
from halftune.core.errors import ModelError

# Alternative keys of each size.
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
WIDTH = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim", "moe_intermediate_size")
VOCABULARY = ("vocab_size",)
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_top_k")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
FORMATS |= {"float64": "fp64", "double": "fp64"}


def attention(text: dict[str, Any], family: Family, layers: int, where: str) -> dict[str, Any]:
    """Facts about attention and the layers without it, by their attribute names."""
    window = number(text, ("sliding_window",), where) or None if text.get("use_sliding_window", True) else None
    dropout = _first(text, ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"), 0.0)
    return {
        "linear_layers": _count_linear(family, text, layers),
        "sliding_window": window,
        "window_layers": _window_layers(text, layers) if window else 0,
        "softcap": number(text, ("attn_logit_softcapping",), where),
        "sinks": family.sinks,
        "attention_dropout": float(dropout),
    }


def experts(text: dict[str, Any], where: str) -> dict[str, Any]:
    """Numbers of experts, by their attribute names; 0 for dense models."""
    count = number(text, EXPERTS, where) or 0
    return {"num_experts": count, "num_experts_per_token": (number(text, PER_TOKEN, where) or 0) if count else 0}


def without_nulls(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that have a value."""
    return {key: value for key, value in settings.items() if value is not None}


def grouped(text: dict[str, Any]) -> dict[str, Any]:
    """Settings of attention and MLP in separate groups, as in DBRX and MPT."""
    attention, mlp = (text[name] if isinstance(text.get(name), dict) else {} for name in ("attn_config", "ffn_config"))
    return without_nulls(attention) | without_nulls(mlp)


def _first(text: dict[str, Any], keys: tuple[str, ...], otherwise: Any) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), otherwise)


def sizes_of(text: dict[str, Any], where: str, built: Architecture | None) -> dict[str, Any]:
    """The sizes, by their attribute names."""
    _check_said(text, where)
    hidden, layers = _whole(text, HIDDEN, where), _whole(text, LAYERS, where, len(_layer_kinds(text)) or None)
    heads = _whole(text, HEADS, where, 1)
    kv_heads = _whole(text, KEY_HEADS, where, heads)
    latent = ("qk_nope_head_dim", "qk_rope_head_dim") if text.get("kv_lora_rank") else ()  # queries have two parts
    head_dim = sum(int(text.get(part) or 0) for part in latent) or _whole(text, HEAD_DIM, where, hidden // heads)
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _whole(text, WIDTH, where, 4 * hidden),
        "vocab_size": _whole(text, VOCABULARY, where),
        "tie_word_embeddings": built.tied if built else bool(text.get("tie_word_embeddings", False)),
    }


def _check_said(text: dict[str, Any], where: str) -> None:
    """Check that the config of a model with remote code has all sizes, since its code is not run for defaults.

    Raises:
        ModelError: names every missing size.
    """
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": () if _layer_kinds(text) else LAYERS, "vocab_size": VOCABULARY}
    unsaid = [name for name, keys in sizes.items() if keys and _first(text, keys, None) is None]
    if unsaid and text.get("auto_map"):
        remedy = f"add {' and '.join(unsaid)} to config.json (the remote code has a default or another name)"
        what = f"{', '.join(unsaid)} {'are' if unsaid[1:] else 'is'} missing"
        raise ModelError(what, where=where, remedy=remedy, code="model.config_incomplete")


def _layer_kinds(text: dict[str, Any]) -> list[Any]:
    """The kinds of all layers, if listed; nemotron_h has no other number of layers."""
    kinds = _first(text, ("layers_block_type", "layer_types"), [])
    return kinds if isinstance(kinds, list) else []


def _whole(text: dict[str, Any], keys: tuple[str, ...], where: str, otherwise: int | None = None) -> int:
    value = _first(text, keys, otherwise)
    if isinstance(value, list) and all(isinstance(size, int) for size in value):
        value = max(value, default=None)  # one per layer: use the largest
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        said = "is missing" if value is None else f"expected an integer ≥ 1, got {value!r}"
        raise ModelError(f"{keys[0]}: {said}", where=where, remedy="download it again", code="model.config_invalid")
    return value


def number(text: dict[str, Any], keys: tuple[str, ...], where: str) -> Any:
    """A number that may be absent."""
    value = _first(text, keys, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        what = f"{keys[0]}: expected a number, got {value!r}"
        raise ModelError(what, where=where, remedy="download it again", code="model.config_invalid")
    return value


def dtype_of(text: dict[str, Any]) -> str | None:
    return FORMATS.get(str(_first(text, ("dtype", "torch_dtype"), "")).removeprefix("torch."))


def _window_layers(text: dict[str, Any], layers: int) -> int:
    if types := text.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in types[:layers])
    if pattern := text.get("sliding_window_pattern"):
        return sum((layer + 1) % int(pattern) != 0 for layer in range(layers))
    return layers - min(layers, int(text.get("max_window_layers") or 0)) if "max_window_layers" in text else layers


def _count_linear(family: Family, text: dict[str, Any], layers: int) -> int:
    """Number of layers with linear attention, from ``layer_types`` or the interval of full-attention layers."""
    if types := text.get("layer_types"):
        return sum("attention" not in kind or "linear" in kind for kind in types[:layers])
    if "linear_num_value_heads" in text:
        interval = int(text.get("full_attention_interval", 4))
        return sum((layer + 1) % interval != 0 for layer in range(layers))
    return layers if family.hybrid else 0  # config.json lists them in another way
