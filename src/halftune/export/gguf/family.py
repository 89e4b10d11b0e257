"""What llama.cpp has to know of a model's config, for the families of gguf.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from halftune.core.packaged import read_yaml
from halftune.export.gguf.unsupported import unsupported

MOST_CONTEXT = 2**31 - 1


@dataclass(frozen=True)
class Family:
    """A row of gguf.yaml.

    Attributes:
        architecture: llama.cpp's name.
        activation: of the feed-forward layers; llama.cpp has it in its code.
        permuted: whether rows of query and key have another order in GGUF.
        plus_one: whether norms are stored with 1 added.
        sliding: every n-th layer attends to all tokens, the others to a window; 0: all do.
        whole_heads: the heads together are as wide as the hidden state.
    """

    architecture: str
    activation: str
    permuted: bool = False
    plus_one: bool = False
    sliding: int = 0
    whole_heads: bool = False


def family_of(config: PretrainedConfig, where: str) -> Family:
    """Return the family of a model, after checking that llama.cpp computes what its config says.

    Raises:
        ModelError: it does not, or the type is not in gguf.yaml.
    """
    rows: dict[str, Any] = read_yaml("halftune.export.gguf", "gguf.yaml")["families"]
    if config.model_type not in rows:
        raise unsupported(f"the model type {config.model_type}; known: {', '.join(rows)}", where)
    family, made = Family(**rows[config.model_type]), vars(config)
    act = made.get("hidden_activation") or made.get("hidden_act")
    rope = rope_of(config)
    width = head_width(config)
    checks = {
        f"the activation {act}": act == family.activation,
        f"rope_type {rope['rope_type']}": rope["rope_type"] in ("default", "linear", "llama3"),
        "a rotary embedding of a part of each head": rope.get("partial_rotary_factor", 1.0) == 1.0,
        "rope_type llama3 of this model type": rope["rope_type"] != "llama3" or family.permuted,
        "this order of layers with sliding windows": _layers(config) == _expected(family, config),
        "query_pre_attn_scalar differs from head_dim": made.get("query_pre_attn_scalar", width) == width,
        "this head_dim": not family.whole_heads or width * made["num_attention_heads"] == made["hidden_size"],
        "bidirectional attention": not made.get("use_bidirectional_attention"),
    }
    for what, holds in checks.items():
        if not holds:
            raise unsupported(what, where)
    return family


def head_width(config: PretrainedConfig) -> int:
    """Elements of a head of query and key."""
    made = vars(config)
    return made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]


def rope_of(config: PretrainedConfig, layers: str = "full_attention") -> dict[str, Any]:
    """The parameters of the rotary embedding of a kind of layers."""
    found = vars(config)["rope_parameters"]
    return found.get(layers, found)


def _layers(config: PretrainedConfig) -> list[bool]:
    """Whether each layer has a sliding window."""
    types = vars(config).get("layer_types") or ["full_attention"] * vars(config)["num_hidden_layers"]
    if config.model_type == "mistral" and vars(config).get("sliding_window") is not None:
        return [True] * len(types)
    return [one == "sliding_attention" for one in types]


def _expected(family: Family, config: PretrainedConfig) -> list[bool]:
    count = vars(config)["num_hidden_layers"]
    return [family.sliding > 0 and (layer + 1) % family.sliding != 0 for layer in range(count)]


def metadata(family: Family, config: PretrainedConfig) -> dict[str, int | float | str | list[bool]]:
    """The model's keys in a GGUF file, without the architecture's name before them."""
    made, rope = vars(config), rope_of(config)
    found: dict[str, Any] = {
        "block_count": made["num_hidden_layers"],
        "context_length": made["max_position_embeddings"],
        "embedding_length": made["hidden_size"],
        "feed_forward_length": made["intermediate_size"],
        "vocab_size": made["vocab_size"],
        "attention.head_count": made["num_attention_heads"],
        "attention.head_count_kv": made["num_key_value_heads"],
        "attention.key_length": head_width(config),
        "attention.value_length": head_width(config),
        "attention.layer_norm_rms_epsilon": float(made["rms_norm_eps"]),
        "rope.dimension_count": head_width(config),
        "rope.freq_base": float(rope["rope_theta"]),
        "attn_logit_softcapping": made.get("attn_logit_softcapping"),
        "final_logit_softcapping": made.get("final_logit_softcapping"),
    }
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if family.sliding:
        found["attention.sliding_window"] = made["sliding_window"]
        found["attention.sliding_window_pattern"] = _layers(config)
        found["rope.freq_base_swa"] = float(rope_of(config, "sliding_attention")["rope_theta"])
    return {key: value for key, value in found.items() if value is not None}


def rope_factors(config: PretrainedConfig) -> torch.Tensor | None:
    """By what each rotary frequency is divided, ``[head_dim / 2]`` in fp32; None without Llama 3's scaling."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    width = head_width(config)
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled
