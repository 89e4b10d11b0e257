"""The sizes of an RWKV-7 model from config.json in flash-linear-attention's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halftune.core.errors import ModelError

RWKV7_DEFAULTS: dict[str, Any] = {
    "attn_mode": "chunk",
    "hidden_size": 2048,
    "hidden_ratio": 4,
    "num_hidden_layers": 24,
    "head_dim": 64,
    "decay_low_rank_dim": 64,
    "gate_low_rank_dim": 128,
    "a_low_rank_dim": 64,
    "v_low_rank_dim": 16,
    "hidden_act": "sqrelu",
    "max_position_embeddings": 2048,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "fuse_norm": True,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""The format's defaults; files omit values that equal them."""
_NULLS = ("head_dim", "decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")


@dataclass(frozen=True)
class Rwkv7Shape:
    """Sizes of the layers.

    Attributes:
        hidden: width of the residual stream, and of receptance, keys and decay.
        layers: number of layers.
        heads: number of heads of the time mixing.
        head_dim: width of a key's head.
        value: width of values, all heads together.
        width: inner width of the channel mixing.
        decay_rank, a_rank, v_rank, gate_rank: of the low-rank maps w, a, v and g.
    """

    hidden: int
    layers: int
    heads: int
    head_dim: int
    value: int
    width: int
    decay_rank: int
    a_rank: int
    v_rank: int
    gate_rank: int


def rwkv7_shape(raw: Mapping[str, Any]) -> Rwkv7Shape:
    """Return the sizes from the values of a config.json, with the format's defaults.

    Raises:
        ModelError: layers of softmax attention, widths that do not divide, or values of several widths.
    """
    stated = {name: value for name, value in raw.items() if value is not None or name in _NULLS}
    settings = {**RWKV7_DEFAULTS, **stated}
    hidden, layers = int(settings["hidden_size"]), int(settings["num_hidden_layers"])
    if settings.get("attn"):
        remedy = "use a checkpoint without `attn` in its config.json"
        what = "RWKV-7 with softmax-attention layers is not supported"
        raise ModelError(what, remedy=remedy, code="model.architecture_unsupported")
    head_dim = int(settings["head_dim"] or hidden // int(settings.get("num_heads") or hidden))
    if not head_dim or hidden % head_dim:
        what = f"config.json: hidden_size {hidden} is not a multiple of head_dim {head_dim}"
        raise ModelError(what, code="model.config_invalid")
    heads, value = hidden // head_dim, _value(settings.get("value_dim"), hidden)
    if value % heads:
        what = f"config.json: value_dim {value} is not a multiple of the {heads} heads"
        raise ModelError(what, code="model.config_invalid")
    width = settings.get("intermediate_size") or -(-int(hidden * settings["hidden_ratio"]) // 32) * 32
    return Rwkv7Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        value=value,
        width=int(width),
        decay_rank=_rank(settings, "decay_low_rank_dim", 2.5 * head_dim / 64, hidden),
        a_rank=_rank(settings, "a_low_rank_dim", 2.5 * head_dim / 64, hidden),
        v_rank=_rank(settings, "v_low_rank_dim", 1.7 * head_dim / 64, hidden),
        gate_rank=_rank(settings, "gate_low_rank_dim", 5.0, hidden),
    )


def _value(value: Any, hidden: int) -> int:
    """The width of values, the same in every layer: the first layer's are mixed into all others."""
    if value is None:
        return hidden
    widths = set(value) if isinstance(value, list | tuple) else {value}
    if len(widths) != 1:
        raise ModelError(f"config.json: value_dim has several widths: {sorted(widths)}", code="model.config_invalid")
    return int(widths.pop())


def _rank(given: Mapping[str, Any], name: str, factor: float, hidden: int) -> int:
    """The value in config.json; for null, the nearest multiple of 32 to ``factor * sqrt(hidden)``."""
    rank = given[name]
    return int(rank) if rank is not None else max(32, round(factor * hidden**0.5 / 32) * 32)
