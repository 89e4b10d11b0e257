"""Estimates the activation memory of linear-attention layers if our operators use torch, from the model's sizes."""

from __future__ import annotations

from halftune.attention.linear import runs_in_torch
from halftune.config.facts.model import ModelFacts
from halftune.hardware import Hardware
from halftune_kernels.memory import CUTS, Held, held_in_torch

# config.json's keys for heads, groups, key and value sizes, per family; the first complete tuple applies
_NAMES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "gated_delta_rule": (
        ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ),
    "kda": (
        ("linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim"),
        ("num_attention_heads", "num_attention_heads", "head_dim", "head_dim"),
    ),
    "ssd": (
        ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head"),
        ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim"),
        ("n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_headdim"),
        ("num_heads", "n_groups", "state_size", "head_dim"),
    ),
}


def held_by_layer(hardware: Hardware, facts: ModelFacts, linear: str, samples: int, length: int) -> Held:
    """Return the bytes that one layer saves for backward and needs during backward; zeros if unknown.

    Args:
        hardware: the machine.
        facts: the model.
        linear: the plan's backend of these layers.
        samples: samples per micro-batch.
        length: tokens per sample.
    """
    operator = next((name for name in facts.family.operators if name in CUTS), None)
    if linear != "halftune" or operator is None or not facts.linear_layers or not runs_in_torch(hardware, facts):
        return Held(0, 0)
    sizes = _sizes(operator, facts)
    if not sizes or min(sizes) < 1 or sizes[0] % sizes[1]:
        return Held(0, 0)
    heads, groups, keys, values = sizes
    return held_in_torch(operator, samples, length, heads=heads, groups=groups, keys=keys, values=values)


def _sizes(operator: str, facts: ModelFacts) -> list[int]:
    """Heads, groups, key and value sizes; empty if config.json does not have them."""
    raw = facts.decoder_config
    if operator == "rwkv7":
        size = int(raw.get("head_dim") or 64)
        return [facts.hidden_size // size, facts.hidden_size // size, size, size]
    for names in _NAMES[operator]:
        if all(map(raw.get, names)):
            return [int(raw[name]) for name in names]
    return []
