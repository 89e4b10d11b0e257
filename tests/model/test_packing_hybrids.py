"""Models whose layers carry a state along the row: each is refused with its reason, or packs correctly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_model import because, plan
from transformers import AutoConfig, PretrainedConfig

from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.config.sections.data import PackingSection
from halftune.core.errors import PlanError
from halftune.model.attention.packing_check import packing_verdict, small_copy
from halftune.plan.packing import choose_packing

DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": {},
    "bailing_hybrid": {},
    "mamba": {},
    "mamba2": {},
    "falcon_mamba": {},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 4},
    "falcon_h1": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "nemotron_h": {},
    "zamba": {},
    "zamba2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "jamba": {},
    "minimax": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "xlstm": {},
    "inkling_text": {},
    "zaya": {},
}


def config_of(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **HYBRIDS[family])


def facts_of(config: PretrainedConfig) -> ModelFacts:
    raw = {"num_hidden_layers": config.num_hidden_layers, **config.to_dict()}  # as config.json on the hub has it
    return facts_from_config(raw, config.model_type)


@pytest.mark.parametrize("family", HYBRIDS)
def test_refused_with_its_reason_or_packed_as_alone(family: str) -> None:
    config = config_of(family)
    facts = facts_of(config)
    choice = choose_packing(PackingSection(), facts, trust_remote_code=False)
    made = plan()
    made = replace(made, attention=replace(made.attention, linear=because("halftune")))
    if choice.value:
        verdict = packing_verdict(config, replace(made, batch=replace(made.batch, packing=because(True))))
        assert verdict.value, verdict.reason
        return
    assert f"layers of {family} carry a state along the row" in choice.reason
    with pytest.raises(PlanError) as refused:
        choose_packing(PackingSection(enabled=True), facts, trust_remote_code=False)
    assert refused.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize("family", sorted(HYBRIDS.keys() - {"rwkv", "xlstm", "zamba"}))
def test_a_small_copy_has_every_kind_of_layer(family: str) -> None:
    """So that the check at the start can judge them; the three that are left out cannot be made smaller."""
    model = small_copy(config_of(family))
    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000_000
    kinds = {type(module).__name__ for module in model.modules()}
    mixer = ("Mamba", "Mixer", "Delta", "Conv", "Lightning", "Recurrent", "Linear", "Kimi", "Lfm", "Short")
    assert any(word in kind for kind in kinds for word in mixer)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama4_text", {"attention_chunk_size": 8192}, "attention in chunks"),
        ("deepseek_v32", {}, "index_topk"),
        ("glm_moe_dsa", {}, "index_topk"),
    ],
)
def test_attention_that_looks_at_the_whole_row(family: str, changes: dict[str, Any], says: str) -> None:
    config = AutoConfig.for_model(family, **changes)
    choice = choose_packing(PackingSection(), facts_of(config), trust_remote_code=False)
    assert not choice.value
    assert says in choice.reason
    made = plan()
    assert not packing_verdict(config, replace(made, batch=replace(made.batch, packing=because(True)))).value


def test_keys_that_are_not_those_of_the_row_are_a_refusal() -> None:
    made = plan()
    packed = replace(made, batch=replace(made.batch, packing=because(True)))
    verdict = packing_verdict(AutoConfig.for_model("deepseek_v4"), packed)
    assert not verdict.value
    assert "keys, but" in verdict.reason
