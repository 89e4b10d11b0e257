"""What a family's linear-attention layers hold where torch computes them, from config.json alone."""

from __future__ import annotations

import pytest

from halftune.attention.linear_memory import held_by_layer
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.hardware.catalogue import lookup
from halftune_kernels.memory import held_in_torch

SIZES = {
    "qwen3_5-tiny": ("gated_delta_rule", 8, 4, 32, 32),
    "kimi_linear-tiny": ("kda", 4, 4, 32, 32),
    "mamba2-tiny": ("ssd", 8, 2, 32, 48),
    "rwkv7-tiny": ("rwkv7", 6, 6, 32, 32),
}


def facts(model: str) -> ModelFacts:
    return facts_from_config(dict(BUILTIN_MODELS[model]), "here")


@pytest.mark.parametrize("model", SIZES)
def test_sizes_of_each_family(model: str) -> None:
    operator, heads, groups, keys, values = SIZES[model]
    held = held_by_layer(lookup("cpu"), facts(model), "halftune", 2, 700)
    assert held == held_in_torch(operator, 2, 700, heads=heads, groups=groups, keys=keys, values=values)
    assert held.kept > 0


def test_only_where_torch_computes_our_operators() -> None:
    model, triton = facts("qwen3_5-tiny"), {"triton": "3.7.1"}
    on_t4 = held_by_layer(lookup("t4", triton), model, "halftune", 1, 2048)
    assert on_t4 == held_by_layer(lookup("cpu"), model, "halftune", 1, 2048)
    assert held_by_layer(lookup("a100", triton), model, "halftune", 1, 2048) == (0, 0)
    assert held_by_layer(lookup("cpu"), model, "torch", 1, 2048) == (0, 0)
    assert held_by_layer(lookup("cpu"), facts("qwen2-tiny"), "none", 1, 2048) == (0, 0)
