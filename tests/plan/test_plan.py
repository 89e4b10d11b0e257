"""The whole plan: what hangs together, golden plans on four machines, and how they read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published import QWEN2_5_0_5B

from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.plan import Plan, explain, resolve, to_dict
from halftune.plan.duration import clock, duration, pace_of, run_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"train": ["data.jsonl"]},
        "training": {"output_dir": "runs/x", "gradient_accumulation_steps": 4},
    }
    for name, value in sections.items():
        base[name] = {**base[name], **value} if name in base and isinstance(value, dict) else value
    return RunConfig.model_validate(base)


RATE = {"output_dir": "out", "learning_rate": 2e-4}


def qwen(**extra: Any) -> ModelFacts:
    return facts_from_config({**QWEN2_5_0_5B, **extra}, "Qwen/Qwen2.5-0.5B-Instruct")


def planned(machine: str, facts: ModelFacts | None = None, world_size: int = 1, **sections: Any) -> Plan:
    return resolve(config(**sections), lookup(machine), facts or qwen(), world_size)


@pytest.mark.parametrize("machine", ["cpu", "t4", "a100", "h200"])
def test_golden_plans(machine: str) -> None:
    """A change of the plan is a change of what users get: look at the difference, then write the file anew."""
    precision = {"compute": "bf16", "on_unsupported": "fallback"}
    made = to_dict(planned(machine, precision=precision, data={"packing": True}))
    file = GOLDEN / f"qwen_lora_bf16_{machine}.json"
    if not file.exists():  # the way to write it anew is to remove it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
        pytest.fail(f"{file.name} was missing and has been written: look at it")
    assert made == json.loads(file.read_text())


@pytest.mark.parametrize("machine", CATALOGUE)
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("model", ["builtin:qwen2-tiny", "builtin:qwen3_5-tiny", "builtin:llama-tiny"])
def test_every_machine_gets_a_plan_that_can_be_read(machine: str, adapter: str, model: str) -> None:
    run = config(model={"name_or_path": model}, adapter=adapter)
    plan = resolve(run, lookup(machine), read_model_facts(run.model))
    assert json.loads(json.dumps(to_dict(plan))) == to_dict(plan)
    assert plan.memory.verdict.value == "fits"
    lines = explain(plan, width=80).splitlines()
    assert max(map(len, lines)) <= 80


def test_the_table_shows_every_decision_with_its_reason() -> None:
    plan = planned("a100+t4", hybrid(), 2)
    text = " ".join(explain(plan, width=300).split())
    choices = [value for value in vars(plan.precision).values() if isinstance(value, Choice)]
    choices += [plan.device, plan.distribution, plan.num_parameters, plan.num_trainable, plan.memory.verdict]
    choices += [plan.attention.softmax, plan.attention.linear, plan.batch.packing, plan.batch.gradient_checkpointing]
    for choice in choices:
        assert choice.reason in text
    for _, reason in plan.attention.rejected:
        assert reason in text
    for warning in plan.warnings:
        assert warning in text
    assert all(len(line) <= 60 for line in explain(plan, width=60).splitlines())


def test_weights_and_counts() -> None:
    plan = planned("a100")
    assert plan.num_parameters.value == 494_032_768
    assert plan.num_trainable.value == 8_798_208
    assert plan.batch.tokens_per_step == 4 * 4 * 2048
    assert planned("t4x2", world_size=2, precision="auto").batch.tokens_per_step == 2 * 4 * 4 * 2048
    assert planned("t4x2", world_size=2).distribution.value == "ddp"


def test_an_idle_device_is_mentioned() -> None:
    assert any("1 of 2 devices" in warning for warning in planned("a100x2").warnings)
    assert planned("a100x2", world_size=2).warnings == ()


def hybrid() -> ModelFacts:
    return qwen(model_type="qwen3_5_text", **LINEAR)


def test_packing() -> None:
    assert planned("a100").batch.packing.value is True
    assert planned("a100", data={"packing": False}).batch.packing.value is False
    kept = planned("a100", hybrid()).batch.packing
    assert kept.value is True
    assert "18 of 24 layers carry a state, which is reset at each sample" in kept.reason
    own = {"linear": "torch"}
    off = planned("a100", hybrid(), attention=own).batch.packing
    assert off.value is False
    assert "transformers' own code of qwen3_5_text treats a row as one sample" in off.reason
    with pytest.raises(PlanError) as refused:
        planned("a100", hybrid(), attention=own, data={"packing": True})
    assert refused.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize(
    ("raw", "says", "refused"),
    [
        ({"model_type": "codegen", "rotary_dim": 8}, "treats a row as one sample", True),
        ({"model_type": "bloom"}, "ALiBi", True),
        ({"model_type": "falcon", "alibi": True}, "ALiBi", True),
        ({"model_type": "jamba"}, "carry a state", True),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "in chunks", False),
    ],
)
def test_families_that_are_not_packed(raw: dict[str, Any], says: str, refused: bool) -> None:
    facts = qwen(**raw)
    choice = planned("cpu", facts, attention="auto").batch.packing
    assert choice.value is False
    assert says in choice.reason
    if refused:
        with pytest.raises(PlanError) as caught:
            planned("cpu", facts, data={"packing": True})
        assert caught.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize(
    ("raw", "bound"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, 32768),
    ],
)
def test_rotary_frequencies_of_the_longest_sample_forbid_packing(raw: dict[str, Any], bound: int) -> None:
    """transformers chooses them once for a forward pass: a sample beside a longer one would get other positions."""
    facts = qwen(model_type="phi3", max_position_embeddings=32768, **raw)

    def packing(**data: Any) -> Any:
        return planned("cpu", facts, attention="auto", data=data).batch.packing

    assert packing(max_length=bound).value is True
    above = packing(max_length=bound + 1)
    assert above.value is False
    assert f"RoPE, above {bound:,} tokens" in above.reason
    with pytest.raises(PlanError) as refused:
        packing(max_length=bound + 1, packing=True)
    assert refused.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_bigcode"])
def test_learned_positions_restart_with_each_sample(kind: str) -> None:
    packing = planned("cpu", qwen(model_type=kind), attention="auto").batch.packing
    assert packing.value is True
    assert "learned positions" in packing.reason


def test_an_old_config_that_does_not_name_its_positions_packs_where_they_are_always_rotary() -> None:
    def facts(kind: str) -> Any:
        raw = {key: value for key, value in (qwen().raw or {}).items() if not key.startswith("rope")}
        return replace(qwen(), model_type=kind, text_type=kind, raw={**raw, "model_type": kind})

    assert planned("cpu", facts("llama"), attention="auto").batch.packing.value is True
    assert planned("cpu", facts("cogvlm"), attention="auto").batch.packing.value is False


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_every_backend_packs(kind: str) -> None:
    facts = facts_from_config({**QWEN2_5_0_5B, "model_type": kind, "head_dim": 64}, kind)
    for machine, section, softmax, varlen in (
        ("cpu", {}, "eager", "segments"),
        ("t4", {}, "eager", "segments"),
        ("a100", {}, "flex", "block_mask"),
        ("a100", {"data": {"packing": True}}, "flex", "block_mask"),
        ("a100", {"attention": "flex"}, "flex", "block_mask"),
        ("a100", {"attention": "eager"}, "eager", "segments"),
    ):
        plan = planned(machine, facts, **section)
        found = (plan.batch.packing.value, plan.attention.softmax.value, plan.attention.varlen.value)
        assert found == (True, softmax, varlen), (machine, section)


def test_compiled_layers_are_cut_by_a_block_mask() -> None:
    compiled = {"training": {"torch_compile": True, "output_dir": "r"}}

    def warned(**asked: Any) -> bool:
        plan = planned("a100", attention="flex", **compiled, **asked)
        return any("ends a graph in every layer" in warning for warning in plan.warnings)

    assert warned()
    assert not warned(data={"packing": False})


def test_float8_training_is_slow_unless_it_is_compiled() -> None:
    def warned(adapter: str, **training: Any) -> bool:
        precision = {"compute": "bf16", "linear": "fp8"}
        plan = planned("h200", adapter=adapter, precision=precision, training={"output_dir": "r", **training})
        return any(warning.startswith("precision.linear: fp8") for warning in plan.warnings)

    assert warned("none")
    assert not warned("none", torch_compile=True)
    assert not warned("lora")


def test_frozen_weights_in_float8_are_small() -> None:
    half, eighth = (
        planned("h200", qwen(), precision={"compute": "bf16", "linear": linear}).memory.weights
        for linear in ("auto", "fp8")
    )
    layers = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert half - eighth == layers


def test_positions_beyond_the_models_are_mentioned() -> None:
    assert "32,768 positions" in planned("h200", data={"max_length": 40000}).warnings[0]


@pytest.mark.parametrize(
    ("adapter", "method", "start"),
    [("lora", "sft", ""), ("none", "sft", "1e-05"), ("lora", "dpo", "5e-06"), ("none", "kto", "5e-07")],
)
def test_a_learning_rate_that_is_not_set_is_that_of_lora_with_sft(adapter: str, method: str, start: str) -> None:
    asked = {"adapter": {"type": adapter}, "method": {"type": method}}
    warnings = [one for one in planned("h100", **asked).warnings if "learning_rate" in one]
    assert [start in one for one in warnings] == [True] * bool(start)
    assert not [one for one in planned("h100", **asked, training=RATE).warnings if "learning_rate" in one]


def test_moments_in_another_dtype_need_adamw() -> None:
    with pytest.raises(PlanError, match="sgd keeps its moments"):
        planned("a100", precision={"optimizer_state": "bf16"}, training={"optim": "sgd"})


def test_old_gpus_are_told_about_cuda_builds() -> None:
    assert any("CUDA 12 build" in warning for warning in planned("v100").warnings)
    assert not any("CUDA 12 build" in warning for warning in planned("t4").warnings)


def test_checkpointing_comes_on_when_memory_says_so() -> None:
    roomy, narrow = planned("h200"), planned("t4", data={"max_length": 8192})
    assert roomy.batch.gradient_checkpointing.value is False
    assert narrow.batch.gradient_checkpointing.value is True
    assert "without it" in narrow.batch.gradient_checkpointing.reason
    asked = planned("h200", training={"gradient_checkpointing": True})
    assert asked.batch.gradient_checkpointing.reason.startswith("asked for")
    assert asked.memory.activations < roomy.memory.activations / 3


def test_what_does_not_fit_says_what_to_try() -> None:
    large = qwen(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672)
    plan = planned("t4", large, adapter="none")
    assert plan.memory.verdict.value == "does not fit"
    assert "adapter: lora" in plan.memory.verdict.reason
    assert "not expected to fit" in plan.warnings[-1]
    assert "▶" in explain(plan, width=80)


def test_the_parts_of_the_total() -> None:
    memory = to_dict(planned("a100"))["memory"]
    parts = sum(memory[name] for name in ("weights", "gradients", "optimizer", "activations", "logits", "overhead"))
    assert memory["total"] == parts - memory["overlap"]


METRICS = [
    *(
        {"step": i, "epoch": i / 20, "loss": 1.0, "tokens": 1000, "seconds": 9.0 if i < 3 else 0.5}
        for i in range(1, 11)
    ),
    {"step": 10, "epoch": 0.5, "eval_loss": 1.0, "eval_seconds": 3.0},
]


def test_a_known_pace_gives_a_duration() -> None:
    lines = [*map(json.dumps, METRICS), '{"step": 11, "ep']
    pace = pace_of(lines)
    assert pace is not None
    assert (pace.tokens_per_second, pace.tokens_per_epoch) == (2000.0, 20_000.0)
    line = duration(config(), planned("cpu"), pace)
    assert line == "Time: 30 s for 3 epochs of 20,000 tokens (2,000 tokens/s in an earlier run here)."
    steps = config(training={"max_steps": 1000})
    assert duration(steps, planned("cpu"), pace).startswith("Time: 9 min for 1,000 steps")
    unknown = replace(pace, tokens_per_epoch=None)
    assert "9 min for 1,000 steps" in duration(steps, planned("cpu"), unknown)
    assert run_tokens(config(), planned("cpu"), unknown) is None
    assert pace_of(["", "{}", "[]"]) is None
    assert [clock(s) for s in (0.2, 89, 91, 5400, 12_000)] == ["1 s", "89 s", "2 min", "1 h 30 min", "3 h 20 min"]


def test_experts_are_planned_where_there_are_any() -> None:
    sparse = qwen(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    trained = planned("a100", sparse, precision="bf16", adapter="none")
    assert trained.precision.experts is not None
    assert trained.precision.experts.value == "grouped_mm in bf16"
    assert "not covered by autocast" in trained.precision.experts.reason
    assert "fp32 weights are cast" in " ".join(explain(trained, width=300).split())
    old = planned("t4", sparse, precision="fp16").precision.experts
    assert old is not None
    for name, compute, one in (("a100", "bf16", False), ("h100", "bf16", True), ("h100", "fp16", False)):
        found = planned(name, sparse, precision=compute).precision.experts
        assert found is not None
        assert (found.reason.partition(",")[0] == old.reason.partition(",")[0]) != one, name
    assert "not covered by autocast" not in old.reason, "LoRA's base is in fp16"
    assert planned("a100").precision.experts is None


def test_paged_state_that_does_not_fit_on_the_device_is_tight() -> None:
    asked: dict[str, Any] = {"adapter": "none", "data": {"train": ["data.jsonl"], "max_length": 1024}}
    plans = {
        name: planned("t4", **asked, training={"optim": name, "per_device_train_batch_size": 22})
        for name in ("adamw", "paged_adamw", "paged_adamw_8bit")
    }
    state = {name: plan.memory.optimizer for name, plan in plans.items()}
    assert state["adamw"] == state["paged_adamw"] > 3.9 * state["paged_adamw_8bit"]
    verdicts = [plans[name].memory.verdict.value for name in ("adamw", "paged_adamw")]
    assert verdicts == ["does not fit", "tight"]


def test_lora_plus_is_in_the_plan() -> None:
    reasons = [planned("h100", adapter={"type": "lora", **more}).optimizer for more in ({}, {"lora_plus_ratio": 16})]
    assert [one is not None and "0.0032 for B" in one.reason for one in reasons] == [False, True]
