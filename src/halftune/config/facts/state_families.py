"""Families whose layers carry a state and that are unlike Llama: Mamba-2, Kimi-Linear and RWKV-7."""

from __future__ import annotations

from typing import Any

from halftune.config.facts.rwkv7_shape import rwkv7_shape
from halftune.config.facts.weights import Family, Sheet, Sizes, Tensor, feed_forward, frame


def mamba2(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    """Mamba-2: a mixer in every layer, no attention and no feed-forward blocks."""
    sheet, layers, place = Sheet(), range(sizes.layers), "backbone.layers.*.mixer"
    hidden, heads = sizes.hidden, int(raw["num_heads"])
    inner = int(raw["expand"] * hidden)
    convolved = inner + 2 * int(raw["n_groups"]) * int(raw["state_size"])
    bias = bool(raw.get("use_bias", False))
    sheet.embedding("backbone.embeddings", sizes.vocab, hidden)
    sheet.norm("backbone.layers.*.norm", hidden, layers=layers)
    for name in ("dt_bias", "A_log", "D"):
        sheet.parameter(f"{place}.{name}", heads, layers=layers)
    sheet.parameter(f"{place}.conv1d.weight", convolved, 1, int(raw["conv_kernel"]), layers=layers)
    if raw.get("use_conv_bias", True):
        sheet.parameter(f"{place}.conv1d.bias", convolved, layers=layers)
    sheet.linear(f"{place}.in_proj", hidden, inner + convolved + heads, layers=layers, bias=bias)
    sheet.norm(f"{place}.norm", inner, layers=layers)
    sheet.linear(f"{place}.out_proj", inner, hidden, layers=layers, bias=bias)
    sheet.norm("backbone.norm_f", hidden)
    if not sizes.tied:
        sheet.linear("lm_head", hidden, sizes.vocab)
    return sheet.tensors


MAMBA2_DEFAULTS: dict[str, Any] = {
    "num_heads": 128,
    "expand": 2,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
}


def kimi_linear(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    """Kimi-Linear: delta attention with a decay per channel, latent attention in between, and experts."""
    sheet, family = Sheet(), Family()
    kinds = raw.get("layer_types") or []
    sparse = tuple(i for i, kind in enumerate(raw.get("mlp_layer_types") or []) if kind == "sparse")
    frame(sheet, family, sizes)
    linear = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    _delta_attention(sheet, raw, sizes.hidden, linear)
    _latent_attention(sheet, raw, sizes, tuple(i for i in range(sizes.layers) if i not in linear))
    dense = tuple(i for i in range(sizes.layers) if i not in sparse)
    feed_forward(sheet, family, raw, sizes.hidden, sizes.intermediate, dense, "model.layers.*.mlp")
    if sparse:
        place, width, count = "model.layers.*.mlp", int(raw["moe_intermediate_size"]), int(raw["num_experts"])
        sheet.parameter(f"{place}.experts.gate_up_proj", count, 2 * width, sizes.hidden, layers=sparse)
        sheet.parameter(f"{place}.experts.down_proj", count, sizes.hidden, width, layers=sparse)
        sheet.parameter(f"{place}.gate.weight", count, sizes.hidden, layers=sparse)
        shared = width * int(raw.get("num_shared_experts") or 1)
        feed_forward(sheet, family, raw, sizes.hidden, shared, sparse, f"{place}.shared_experts")
    return sheet.tensors


def _delta_attention(sheet: Sheet, raw: dict[str, Any], hidden: int, layers: tuple[int, ...]) -> None:
    place = "model.layers.*.self_attn"
    heads, width = int(raw["linear_num_heads"]), int(raw["linear_head_dim"])
    inner = heads * width
    for name in ("q_proj", "k_proj", "v_proj"):
        sheet.linear(f"{place}.{name}", hidden, inner, layers=layers)
    sheet.parameter(f"{place}.conv1d.weight", 3 * inner, 1, int(raw["linear_conv_kernel_dim"]), layers=layers)
    sheet.parameter(f"{place}.forget_gate.dt_bias", inner, layers=layers)
    sheet.parameter(f"{place}.forget_gate.A_log", 1, 1, heads, 1, layers=layers)
    for low, high in (("forget_gate.f_a_proj", "forget_gate.f_b_proj"), ("g_a_proj", "g_b_proj")):
        sheet.linear(f"{place}.{low}", hidden, width, layers=layers)
        sheet.linear(f"{place}.{high}", width, inner, layers=layers)
    sheet.linear(f"{place}.b_proj", hidden, heads, layers=layers)
    sheet.norm(f"{place}.o_norm", width, layers=layers)
    sheet.linear(f"{place}.o_proj", inner, hidden, layers=layers)


def _latent_attention(sheet: Sheet, raw: dict[str, Any], sizes: Sizes, layers: tuple[int, ...]) -> None:
    place, rank = "model.layers.*.self_attn", int(raw["kv_lora_rank"])
    plain, rotary, value = (int(raw[f"{name}_head_dim"]) for name in ("qk_nope", "qk_rope", "v"))
    queries = sizes.heads * (plain + rotary)
    if q_rank := raw.get("q_lora_rank"):
        sheet.linear(f"{place}.q_a_proj", sizes.hidden, int(q_rank), layers=layers)
        sheet.norm(f"{place}.q_a_layernorm", int(q_rank), layers=layers)
        sheet.linear(f"{place}.q_b_proj", int(q_rank), queries, layers=layers)
    else:
        sheet.linear(f"{place}.q_proj", sizes.hidden, queries, layers=layers)
    sheet.linear(f"{place}.kv_a_proj_with_mqa", sizes.hidden, rank + rotary, layers=layers)
    sheet.norm(f"{place}.kv_a_layernorm", rank, layers=layers)
    sheet.linear(f"{place}.kv_b_proj", rank, sizes.heads * (plain + value), layers=layers)
    sheet.linear(f"{place}.o_proj", sizes.heads * value, sizes.hidden, layers=layers)


def rwkv7(raw: dict[str, Any], sizes: Sizes) -> list[Tensor]:
    """RWKV-7 in flash-linear-attention's format: time mixing and channel mixing in every layer.

    Raises:
        ModelError: a model of this format that is not supported; says why.
    """
    sheet, shape, layers = Sheet(), rwkv7_shape(raw), range(sizes.layers)
    hidden, bias, later = shape.hidden, bool(raw["norm_bias"]), range(1, sizes.layers)
    sheet.embedding("model.embeddings", sizes.vocab, hidden)
    if raw["norm_first"]:
        sheet.norm("model.layers.*.pre_norm", hidden, layers=(0,), bias=bias)
    for name in ("attn_norm", "ffn_norm"):
        sheet.norm(f"model.layers.*.{name}", hidden, layers=layers, bias=bias)
    place = "model.layers.*.attn"
    for name in "rwkvag":
        sheet.parameter(f"{place}.x_{name}", 1, 1, hidden, layers=layers)
    for name in ("k_k", "k_a"):
        sheet.parameter(f"{place}.{name}", hidden, layers=layers)
    sheet.parameter(f"{place}.r_k", shape.heads, shape.head_dim, layers=layers)
    for name, n_in, n_out in (
        ("r_proj", hidden, hidden),
        ("k_proj", hidden, hidden),
        ("v_proj", hidden, shape.value),
        ("o_proj", shape.value, hidden),
    ):
        sheet.linear(f"{place}.{name}", n_in, n_out, layers=layers)
    for name, rank, n_out, where in (
        ("w", shape.decay_rank, hidden, layers),
        ("v", shape.v_rank, shape.value, later),  # the first layer's values are its own
        ("a", shape.a_rank, hidden, layers),
        ("g", shape.gate_rank, shape.value, layers),
    ):
        if where:
            sheet.linear(f"{place}.{name}_lora.lora.0", hidden, rank, layers=where)
            sheet.linear(f"{place}.{name}_lora.lora.2", rank, n_out, layers=where, bias=name != "g")
    sheet.norm(f"{place}.g_norm", shape.value, layers=layers, bias=True)
    sheet.parameter("model.layers.*.ffn.x_k", hidden, layers=layers)
    sheet.linear("model.layers.*.ffn.key", hidden, shape.width, layers=layers)
    sheet.linear("model.layers.*.ffn.value", shape.width, hidden, layers=layers)
    sheet.norm("model.norm", hidden, bias=bias)
    if not sizes.tied:
        sheet.linear("lm_head", hidden, sizes.vocab)
    return sheet.tensors
