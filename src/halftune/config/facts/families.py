"""Families whose weight tensors are known exactly from config.json, and how each builds its layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from halftune.config.facts.rwkv7_shape import RWKV7_DEFAULTS
from halftune.config.facts.state_families import MAMBA2_DEFAULTS, kimi_linear, mamba2, rwkv7
from halftune.config.facts.weights import Family, Sheet, Sizes, Tensor, attention, feed_forward, frame, switched

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 32}
_LINEAR_MIXER = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_OLMO2_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_ALL: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}  # as Llama switches them

LLAMA_LIKE: dict[str, Family] = {
    "llama": Family(**_ALL, mlp_bias="mlp_bias"),
    "granite": Family(**_ALL, mlp_bias="mlp_bias"),
    "helium": Family(
        qkv_bias="attention_bias", mlp_bias="mlp_bias", defaults={"head_dim": 128, "num_key_value_heads": 20}
    ),
    "smollm3": Family(**_ALL, mlp_bias="mlp_bias", defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(**_ALL, qk_norm="head", defaults=_QWEN3),
    "gemma": Family(**_ALL, defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}),
    "gemma2": Family(
        **_ALL,
        norms=_GEMMA_NORMS,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": Family(
        **_ALL,
        qk_norm="head",
        norms=_GEMMA_NORMS,
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "vocab_size": 262208,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
    ),
    "phi3": Family(mlp="fused", fused_qkv=True),
    "starcoder2": Family(
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        norm="layer",
        mlp="plain",
        defaults={"use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    "olmo": Family(**_ALL, norm="none"),
    "olmo2": Family(**_ALL, qk_norm="full", norms=_OLMO2_NORMS),
    "olmo3": Family(
        **_ALL,
        qk_norm="full",
        norms=_OLMO2_NORMS,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "mixtral": Family(moe="mixtral", defaults={"num_key_value_heads": 8, "num_local_experts": 8}),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        moe="qwen2_moe",
        defaults={
            "qkv_bias": True,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        **_ALL,
        qk_norm="head",
        moe="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "olmoe": Family(
        **_ALL,
        qk_norm="full",
        moe="qwen3_moe",
        defaults={"num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "gpt_oss": Family(
        **_ALL,
        sinks=True,
        moe="gpt_oss",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
    ),
    "qwen3_next": Family(
        **_ALL,
        qk_norm="head",
        out_gate=True,
        moe="qwen2_moe",
        defaults={
            **_LINEAR_MIXER,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3_5_text": Family(**_ALL, qk_norm="head", out_gate=True, defaults={**_LINEAR_MIXER, "num_key_value_heads": 4}),
    "qwen3_5_moe_text": Family(
        **_ALL,
        qk_norm="head",
        out_gate=True,
        moe="qwen2_moe",
        defaults={
            **_LINEAR_MIXER,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}


def llama_like(family_name: str, raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    """All tensors of a family in ``LLAMA_LIKE``; ``raw`` has the family's defaults filled in."""
    family, sheet = LLAMA_LIKE[family_name], Sheet()
    frame(sheet, family, sizes)
    linear = linear_layers(raw, sizes.layers)
    attention(sheet, family, raw, sizes, [layer for layer in range(sizes.layers) if layer not in linear])
    if linear:
        _delta_mixer(sheet, raw, sizes.hidden, linear, fused=family_name == "qwen3_next")
    sparse = _sparse_layers(family, raw, sizes.layers)
    dense = [layer for layer in range(sizes.layers) if layer not in sparse]
    feed_forward(sheet, family, raw, sizes.hidden, sizes.intermediate, dense, "model.layers.*.mlp")
    if sparse:
        _experts(sheet, family, raw, sizes, sparse)
    return sheet.tensors


def linear_layers(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers with linear attention, from ``layer_types`` or the interval of full-attention layers."""
    if types := raw.get("layer_types"):
        return tuple(i for i, kind in enumerate(types[:layers]) if "attention" not in kind or "linear" in kind)
    if "linear_num_value_heads" in raw:
        interval = int(raw.get("full_attention_interval", 4))
        return tuple(i for i in range(layers) if (i + 1) % interval)
    return ()


def _sparse_layers(family: Family, raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    if not family.moe:
        return ()
    step, dense = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _experts(sheet: Sheet, family: Family, raw: dict[str, Any], sizes: Sizes, layers: Sequence[int]) -> None:
    """Router and fused experts: three-dimensional parameters in transformers 5, which adapters do not wrap."""
    place, hidden = "model.layers.*.mlp", sizes.hidden
    count = int(raw.get("num_local_experts") or raw.get("num_experts") or 0)
    width = int(raw.get("moe_intermediate_size") or sizes.intermediate)
    if family.moe == "gpt_oss":
        sheet.parameter(f"{place}.router.weight", count, hidden, layers=layers)
        sheet.parameter(f"{place}.router.bias", count, layers=layers)
        sheet.parameter(f"{place}.experts.gate_up_proj", count, hidden, 2 * width, layers=layers)
        sheet.parameter(f"{place}.experts.gate_up_proj_bias", count, 2 * width, layers=layers)
        sheet.parameter(f"{place}.experts.down_proj", count, width, hidden, layers=layers)
        sheet.parameter(f"{place}.experts.down_proj_bias", count, hidden, layers=layers)
        return
    sheet.parameter(f"{place}.gate.weight", count, hidden, layers=layers)
    sheet.parameter(f"{place}.experts.gate_up_proj", count, 2 * width, hidden, layers=layers)
    sheet.parameter(f"{place}.experts.down_proj", count, hidden, width, layers=layers)
    if family.moe == "qwen2_moe":
        shared = int(raw["shared_expert_intermediate_size"])
        feed_forward(sheet, family, raw, hidden, shared, layers, f"{place}.shared_expert")
        sheet.linear(f"{place}.shared_expert_gate", hidden, 1, layers=layers)


def _delta_mixer(sheet: Sheet, raw: dict[str, Any], hidden: int, layers: Sequence[int], *, fused: bool) -> None:
    """The gated delta rule's mixer; ``fused`` projections as in qwen3_next, separate ones as in qwen3_5."""
    place = "model.layers.*.linear_attn"
    heads = int(raw["linear_num_value_heads"])
    keys = int(raw["linear_num_key_heads"]) * int(raw["linear_key_head_dim"])
    values = heads * int(raw["linear_value_head_dim"])
    sheet.parameter(f"{place}.conv1d.weight", 2 * keys + values, 1, int(raw["linear_conv_kernel_dim"]), layers=layers)
    sheet.parameter(f"{place}.dt_bias", heads, layers=layers)
    sheet.parameter(f"{place}.A_log", heads, layers=layers)
    sheet.norm(f"{place}.norm", int(raw["linear_value_head_dim"]), layers=layers)
    sheet.linear(f"{place}.out_proj", values, hidden, layers=layers)
    if fused:
        sheet.linear(f"{place}.in_proj_qkvz", hidden, 2 * keys + 2 * values, layers=layers)
        sheet.linear(f"{place}.in_proj_ba", hidden, 2 * heads, layers=layers)
        return
    sheet.linear(f"{place}.in_proj_qkv", hidden, 2 * keys + values, layers=layers)
    sheet.linear(f"{place}.in_proj_z", hidden, values, layers=layers)
    sheet.linear(f"{place}.in_proj_b", hidden, heads, layers=layers)
    sheet.linear(f"{place}.in_proj_a", hidden, heads, layers=layers)


def _gpt2(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    sheet, hidden, layers = Sheet(), sizes.hidden, range(sizes.layers)
    sheet.embedding("transformer.wte", sizes.vocab, hidden)
    sheet.embedding("transformer.wpe", int(raw.get("n_positions") or raw.get("max_position_embeddings", 1024)), hidden)
    for name in ("ln_1", "ln_2"):
        sheet.norm(f"transformer.h.*.{name}", hidden, layers=layers, bias=True)
    for name, n_in, n_out in (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, sizes.intermediate),
        ("mlp.c_proj", sizes.intermediate, hidden),
    ):
        sheet.linear(f"transformer.h.*.{name}", n_in, n_out, layers=layers, bias=True)
    sheet.norm("transformer.ln_f", hidden, bias=True)
    if not sizes.tied:
        sheet.linear("lm_head", hidden, sizes.vocab)
    return sheet.tensors


def _gpt_neox(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    sheet, hidden, layers = Sheet(), sizes.hidden, range(sizes.layers)
    bias = bool(raw.get("attention_bias", True))
    sheet.embedding("gpt_neox.embed_in", sizes.vocab, hidden)
    for name in ("input_layernorm", "post_attention_layernorm"):
        sheet.norm(f"gpt_neox.layers.*.{name}", hidden, layers=layers, bias=True)
    sheet.linear("gpt_neox.layers.*.attention.query_key_value", hidden, 3 * hidden, layers=layers, bias=bias)
    sheet.linear("gpt_neox.layers.*.attention.dense", hidden, hidden, layers=layers, bias=bias)
    sheet.linear("gpt_neox.layers.*.mlp.dense_h_to_4h", hidden, sizes.intermediate, layers=layers, bias=True)
    sheet.linear("gpt_neox.layers.*.mlp.dense_4h_to_h", sizes.intermediate, hidden, layers=layers, bias=True)
    sheet.norm("gpt_neox.final_layer_norm", hidden, bias=True)
    if not sizes.tied:
        sheet.linear("lm_head", hidden, sizes.vocab)
    return sheet.tensors


def _falcon(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    sheet, hidden, layers = Sheet(), sizes.hidden, range(sizes.layers)
    new, bias = bool(raw.get("new_decoder_architecture")), switched("bias", raw)
    head_dim, width = hidden // sizes.heads, int(raw.get("ffn_hidden_size") or 4 * hidden)
    if new:
        qkv = (2 * sizes.kv_heads + sizes.heads) * head_dim
    else:
        qkv = hidden + 2 * head_dim if raw.get("multi_query", True) else 3 * hidden
    norms: tuple[str, ...] = ("input_layernorm",)
    if not raw.get("parallel_attn", True):
        norms = ("post_attention_layernorm", "input_layernorm")
    elif (raw.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2:
        norms = ("ln_attn", "ln_mlp")
    sheet.embedding("transformer.word_embeddings", sizes.vocab, hidden)
    for name in norms:
        sheet.norm(f"transformer.h.*.{name}", hidden, layers=layers, bias=True)
    sheet.linear("transformer.h.*.self_attention.query_key_value", hidden, qkv, layers=layers, bias=bias)
    sheet.linear("transformer.h.*.self_attention.dense", hidden, hidden, layers=layers, bias=bias)
    sheet.linear("transformer.h.*.mlp.dense_h_to_4h", hidden, width, layers=layers, bias=bias)
    sheet.linear("transformer.h.*.mlp.dense_4h_to_h", width, hidden, layers=layers, bias=bias)
    sheet.norm("transformer.ln_f", hidden, bias=True)
    if not sizes.tied:
        sheet.linear("lm_head", hidden, sizes.vocab)
    return sheet.tensors


OTHERS: dict[str, tuple[Callable[[dict[str, Any], Sizes], list[Tensor]], dict[str, Any]]] = {
    "gpt2": (_gpt2, {"tie_word_embeddings": True, "attn_pdrop": 0.1, "vocab_size": 50257}),
    "gpt_neox": (_gpt_neox, {"attention_bias": True}),
    "falcon": (_falcon, {"tie_word_embeddings": True}),
    "mamba2": (mamba2, MAMBA2_DEFAULTS),
    "kimi_linear": (kimi_linear, {}),
    "rwkv7": (rwkv7, RWKV7_DEFAULTS),
}


def defaults_of(model_type: str) -> dict[str, Any]:
    """What transformers assumes for this family where config.json is silent."""
    if model_type in LLAMA_LIKE:
        return LLAMA_LIKE[model_type].defaults
    return OTHERS[model_type][1] if model_type in OTHERS else {}


def named_within(tensors: tuple[Tensor, ...], headers: Iterable[str], multimodal: str) -> tuple[Tensor, ...]:
    """Tensors of a language model by their names in the ``multimodal`` class around it; unchanged where that is empty.

    ``headers`` are the names in its files.
    """
    if not multimodal:
        return tensors
    inner = "text_model" if any("text_model." in name for name in headers) else "language_model"
    return tuple(replace(one, name=re.sub(r"^model\.", f"model.{inner}.", one.name)) for one in tensors)


def tensors_of(model_type: str, raw: dict[str, Any], sizes: Sizes) -> tuple[Tensor, ...]:
    """Every weight tensor of the model; empty for a family that is not described here."""
    if model_type in LLAMA_LIKE:
        return tuple(llama_like(model_type, raw, sizes))
    return tuple(OTHERS[model_type][0](raw, sizes)) if model_type in OTHERS else ()
