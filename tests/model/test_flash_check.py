"""The plan gives no layer to FlashAttention whose window only the class's masks have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from halftune.attention.route import route_attention
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.data import PackingSection
from halftune.config.sections.model import AttentionSection, ModelSection
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan.packing import choose_packing

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512}
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen2_moe": ("qwen2_moe", {**WINDOW, **EXPERTS}, True),
    "phimoe": ("phimoe", {**WINDOW, "num_local_experts": 4}, True),
    "no window": ("qwen2_moe", {**WINDOW, **EXPERTS, "use_sliding_window": False}, False),
    "window of all positions": ("qwen2_moe", {**WINDOW, **EXPERTS, "sliding_window": 512}, False),
    "window in the call": ("qwen3_moe", {**WINDOW, **EXPERTS, "head_dim": 16}, False),
    "dense": ("mistral", {**WINDOW, "head_dim": 16}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_that_only_masks_have_is_not_lost(tmp_path: Path, case: str) -> None:
    kind, values, lost = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[kind](**{**SIZES, **values}).to_dict()))
    facts = read_model_facts(ModelSection(name_or_path=str(tmp_path)))
    assert ("windows" in facts.attention_lacks) is lost
    plan = route_attention(AttentionSection(), lookup("a100"), facts, "bf16", packing=False)
    assert plan.softmax.value == ("sdpa" if lost else "fa2")
    assert choose_packing(PackingSection(), facts, trust_remote_code=False).value is not lost
    if lost:
        with pytest.raises(PlanError) as asked:
            route_attention(AttentionSection(backend="fa2"), lookup("a100"), facts, "bf16", packing=False)
        assert asked.value.code == "attention.backend_unavailable"
        with pytest.raises(PlanError) as packed:
            choose_packing(PackingSection(enabled=True), facts, trust_remote_code=False)
        assert packed.value.code == "attention.packing_unsupported"
