"""Memory of vision towers: grows with pixels, and with what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.hardware.catalogue import lookup
from halftune.hardware.tower_memory import patches_per_token, tower_activations
from halftune.plan import resolve

BASE = {
    "model": {"name_or_path": "builtin:qwen2_5_vl-tiny"},
    "data": {"train": "builtin:patterns", "images": True, "max_length": 128},
    "training": {"output_dir": "run"},
}


def config(**changes: dict) -> RunConfig:
    return RunConfig.model_validate({name: {**BASE.get(name, {}), **changes.get(name, {})} for name in BASE | changes})


def test_activations_grow_with_tokens_and_layers_that_are_trained() -> None:
    facts = read_model_facts(config().model)
    assert patches_per_token(facts) == 4

    def bytes_of(tokens: int, **options: bool) -> int:
        return tower_activations(facts, tokens, 4, **{"trained": False, "checkpointing": False, **options})

    assert bytes_of(2000) == pytest.approx(2 * bytes_of(1000), rel=1e-6)
    assert bytes_of(1000, trained=True) > 1.5 * bytes_of(1000)
    deep = tuple(replace(one, layers=tuple(range(24))) if one.layers else one for one in facts.tower_tensors)
    facts = replace(facts, tower_tensors=deep)
    assert bytes_of(1000, trained=True) > 2 * bytes_of(1000, trained=True, checkpointing=True)


def test_the_plan_counts_towers_of_runs_with_images() -> None:
    facts = read_model_facts(config().model)
    seeing = resolve(config(), lookup("a100"), facts).memory
    text = resolve(config(data={"train": "builtin:python-docs", "images": False}), lookup("a100"), facts).memory
    trained = resolve(config(model={"train": {"vision": "lora"}}), lookup("a100"), facts).memory
    width = 2  # bytes of bf16
    assert seeing.weights - text.weights == facts.tower_parameters * width
    assert text.activations < seeing.activations < trained.activations
    assert trained.optimizer > seeing.optimizer
    assert tower_activations(replace(facts, tower_tensors=()), 10, 4, trained=True, checkpointing=False) == 0
