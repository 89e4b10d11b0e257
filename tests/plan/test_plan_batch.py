"""Rows, token budgets, grouping and gradient checkpointing: what the plan makes of them, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.config.load import load_config
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import ConfigError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.plan import Plan, explain, resolve
from halftune.plan.finalise import Evidence, finalise
from halftune.plan.memory import FITS

LLAMA_3B = {
    **{"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28},
    **{"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0},
    "max_position_embeddings": 131072,
}
BATCHES: dict[str, dict[str, Any]] = {
    "rows": {"data": {"packing": False}},
    "packed": {"data": {"packing": True}},
    "tokens": {"data": {"packing": False}, "training": {"tokens_per_batch": 8192}},
    "packed tokens": {"data": {"packing": True}, "training": {"tokens_per_batch": 8192}},
}


def facts() -> ModelFacts:
    return facts_from_config(LLAMA_3B, "llama-3b")


def planned(machine: str, world_size: int = 1, **sections: Any) -> Plan:
    tree: dict[str, Any] = {
        "model": {"name_or_path": "llama-3b"},
        "precision": {"compute": "auto"},
        "data": {"train": ["data.jsonl"], **sections.pop("data", {})},
        "training": {"output_dir": "runs/x", **sections.pop("training", {})},
        **sections,
    }
    return resolve(RunConfig.model_validate(tree), lookup(machine), facts(), world_size)


def decision(kind: str, machine: str, checkpointing: bool | str) -> Plan:
    training = {**BATCHES[kind].get("training", {}), "gradient_checkpointing": checkpointing}
    return planned(machine, **{**BATCHES[kind], "training": training})


@pytest.mark.parametrize("kind", BATCHES)
def test_checkpointing_is_what_the_estimate_says_on_every_machine(kind: str) -> None:
    found = set()
    for machine in CATALOGUE:
        chosen, without, with_it = (decision(kind, machine, asked) for asked in ("auto", False, True))
        needed = without.memory.total > FITS * without.memory.available
        batch = chosen.batch.gradient_checkpointing
        assert batch.value is needed, machine
        assert chosen.memory.total == (with_it if needed else without).memory.total
        assert with_it.memory.activations < without.memory.activations
        if needed:
            assert f"{without.memory.total / 2**30:.1f} GiB without it" in batch.reason
            assert f"{with_it.memory.total / 2**30:.1f} GiB with it, which makes a step a third longer" in batch.reason
        found.add(needed)
    assert found == {True, False}


def test_a_budget_is_as_many_rows_as_fit() -> None:
    rows, tokens = decision("rows", "a100", "auto"), decision("tokens", "a100", "auto")
    packed = decision("packed tokens", "a100", "auto")
    assert (rows.batch.micro_batch, tokens.batch.micro_batch, packed.batch.micro_batch) == (4, 4, 4)
    assert rows.batch.tokens_per_step == tokens.batch.tokens_per_step == packed.batch.tokens_per_step == 8192
    # The same tokens in short rows: at each position some row has a label, so more logits are kept.
    assert tokens.memory.activations == rows.memory.activations
    assert tokens.memory.logits > rows.memory.logits > packed.memory.logits
    odd = {"tokens_per_batch": 7000, "gradient_accumulation_steps": 3}
    assert planned("a100x2", 2, training=odd, data={"packing": False}).batch.tokens_per_step == 7000 * 3 * 2
    assert planned("a100x2", 2, training=odd, data={"packing": True}).batch.tokens_per_step == 3 * 2048 * 3 * 2
    assert decision("packed", "a100", "auto").batch.micro_batch == 4


def test_the_plan_says_it() -> None:
    text = " ".join(explain(decision("tokens", "a100", "auto"), width=200).split())
    assert "8,192 at most: 8,192 tokens × 1 × 1 (device, accumulation, processes)" in text
    assert "grouping on samples of similar length share a batch, batches in random order (data.group_by_length)" in text
    packed = " ".join(explain(decision("packed tokens", "a100", "auto"), width=200).split())
    assert "at most: 4 rows (that is what 8,192 tokens hold) × 1 × 1" in packed
    assert "grouping" not in packed
    off = planned("a100", data={"packing": False, "group_by_length": False}).batch.grouped
    assert (off.value, "switched off" in off.reason) == (False, True)


def test_what_does_not_fit_names_the_budget() -> None:
    reason = planned("t4", adapter="none", training={"tokens_per_batch": 65536}).memory.verdict.reason
    assert "fewer training.tokens_per_batch with more gradient_accumulation_steps" in reason
    assert "per_device_train_batch_size" not in reason
    assert "tokens_per_batch" not in planned("t4", adapter="none", training={"tokens_per_batch": 2048}).warnings[-1]


def test_losing_packing_leaves_a_plan_of_padded_batches() -> None:
    decided = decision("packed tokens", "a100", "auto")
    plan = finalise(decided, Evidence(packing=Choice(False, "the copy leaked")))
    assert not plan.batch.packing.value
    assert any("the copy leaked" in said for said in plan.warnings)
    assert plan.batch.grouped.value
    assert (plan.batch.tokens_per_batch, plan.batch.tokens_per_step) == (8192, 8192)


RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
data: {train: "builtin:python-docs", max_length: 512}
training: {output_dir: out}
"""


@pytest.mark.parametrize(
    ("overrides", "says", "remedy"),
    [
        (("tokens_per_batch=4096", "per_device_train_batch_size=8"), "both set", "remove one of them"),
        (("tokens_per_batch=500",), "500 tokens are fewer than a sample of max_length (512)", "at least 512"),
    ],
)
def test_batches_have_one_size(tmp_path: Path, overrides: tuple[str, ...], says: str, remedy: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(RECIPE)
    load_config(path, ["training.tokens_per_batch=4096"])
    load_config(path, ["training.tokens_per_batch=512"])
    with pytest.raises(ConfigError) as refused:
        load_config(path, [f"training.{override}" for override in overrides])
    assert says in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "training", "fused", "why"),
    [
        ("cpu", {}, True, "measured faster on CPUs; norms, gated feed-forward and adapted linear layers"),
        ("a100", {}, True, "measured faster on one H200; norms, gated feed-forward and adapted linear layers, rotary"),
        ("t4", {}, False, "compute capability 7.5"),
        ("a100+t4", {}, False, "compute capability 7.5"),
        ("a100", {"fused_layers": True}, True, "asked for"),
        ("cpu", {"fused_layers": False}, False, "switched off"),
        ("cpu", {"torch_compile": True}, True, "measured faster on CPUs"),
    ],
)
def test_fused_layers_are_a_decision(machine: str, training: dict[str, Any], fused: bool, why: str) -> None:
    plan = planned(machine, training=training)
    choice = plan.batch.fused_layers
    assert choice.value is fused
    assert why in choice.reason
    row = next(line for line in explain(plan, width=200).splitlines() if "fused layers" in line)
    assert ("on" if fused else "off") in row.split()
