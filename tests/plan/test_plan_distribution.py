"""How processes share a model: the choice by memory, its reason, and what each strategy is estimated to take."""

from __future__ import annotations

from typing import Any

import pytest

from halftune.config.facts.model import facts_from_config
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import Plan, explain, resolve

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}


def planned(machine: str, world_size: int, raw: dict[str, Any] | None = None, **sections: Any) -> Plan:
    tree: dict[str, Any] = {
        "model": {"name_or_path": "x/y"},
        "data": {"train": ["x.jsonl"]},
        "training": {"output_dir": "runs/x", "per_device_train_batch_size": 1},
    }
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return resolve(
        RunConfig.model_validate(tree), lookup(machine), facts_from_config(raw or LLAMA_7B, "x/y"), world_size
    )


def estimates(plan: Plan) -> dict[str, int]:
    assert plan.parallel is not None
    return {name: total for name, total, _ in plan.parallel.memory}


def test_a_whole_model_that_fits_is_replicated() -> None:
    plan = planned("a100x8", 8, adapter="lora")
    assert plan.distribution.value == "ddp"
    assert "it fits" in plan.distribution.reason


def test_a_whole_model_that_does_not_fit_is_sharded() -> None:
    plan = planned("a100x8", 8, adapter="none")
    assert plan.distribution.value == "fsdp2"
    assert "does not fit" in plan.distribution.reason
    assert plan.memory.verdict.value == "fits"
    assert plan.memory.total == estimates(plan)["fsdp2"] < estimates(plan)["ddp"]


def test_more_processes_hold_smaller_shares() -> None:
    totals = [estimates(planned(f"a100x{count}", count, adapter="none"))["fsdp2"] for count in (2, 4, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    weights = planned("a100x64", 64, adapter="none").memory.weights
    assert weights > 7e9 * 4 / 64  # the shards, and what is gathered of the others


def test_offloading_and_keeping_gathered_weights_are_counted() -> None:
    def total(**fsdp: bool) -> int:
        return planned("a100x8", 8, adapter="none", distributed={"strategy": "fsdp2", "fsdp": fsdp}).memory.total

    assert total(cpu_offload=True) < total() < total(reshard_after_forward=False)


def test_float8_is_rounded_after_weights_are_gathered() -> None:
    """Frozen float8 weights are not shared; trained ones are gathered in the compute dtype."""
    asked: dict[str, Any] = {"precision": {"compute": "bf16", "linear": "fp8"}, "distributed": "fsdp2"}
    full = planned("h100x8", 8, adapter="none", **asked)
    assert full.distribution.value == "fsdp2"
    assert full.parallel is not None
    assert (full.parallel.param.value, full.parallel.reduce.value) == ("bf16", "fp32")
    with pytest.raises(PlanError) as caught:
        planned("h100x8", 8, adapter="lora", **asked)
    assert (caught.value.where, caught.value.code) == ("distributed.strategy", "plan.strategy_unavailable")


def test_dtypes_between_processes_are_the_plans() -> None:
    full = planned("a100x8", 8, adapter="none", distributed="fsdp2").parallel
    assert full is not None
    assert (full.param.value, full.reduce.value) == ("bf16", "fp32")
    lora = planned("a100x8", 8, adapter="lora", distributed="fsdp2").parallel
    assert lora is not None
    assert (lora.param.value, lora.param.reason, lora.reduce.value) == ("bf16", "as stored", "fp32")


def test_one_process_shares_nothing() -> None:
    plan = planned("a100", 1, adapter="none", distributed="fsdp2")
    assert plan.distribution.value == "single"
    assert plan.parallel is None


def test_processes_of_one_cpu_share_its_memory() -> None:
    one, four = planned("cpu", 1), planned("cpu", 4)
    assert four.memory.available == one.memory.available // 4


@pytest.mark.parametrize(
    ("machine", "sections", "said"),
    [
        ("m2", {"distributed": "fsdp2"}, "MPS"),
        ("cpu", {"distributed": {"strategy": "fsdp2", "fsdp": {"cpu_offload": True}}}, "no memory of its own"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_remedy(machine: str, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        planned(machine, 2, **sections)
    assert refused.value.remedy


def test_fp16_is_not_offloaded() -> None:
    with pytest.raises(PlanError, match="loss scaler all-reduces"):
        planned("t4x2", 2, distributed={"strategy": "fsdp2", "fsdp": {"cpu_offload": True}})


def test_quantised_weights_are_not_sharded() -> None:
    raw = {**LLAMA_7B, "quantization_config": {"quant_method": "bitsandbytes"}}
    plan = planned("t4x2", 2, raw, adapter="lora")
    assert plan.distribution.value == "ddp"
    assert "fsdp2" not in estimates(plan)


def test_the_table_shows_each_strategy() -> None:
    plan = planned("a100x8", 8, adapter="none", distributed={"num_machines": 2, "main_process_ip": "10.0.0.1"})
    text = " ".join(explain(plan, width=200).split())
    assert "8 processes on 2 machines" in text
    assert "with ddp" in text
    assert "with fsdp2" in text
    assert plan.distribution.reason in text


def test_what_main_memory_cannot_hold_is_said() -> None:
    """8 × 25 GiB in fp32, of 128 GiB, where each process reads the whole model into another format than its files'."""
    crowded = "8 processes on a machine each read the whole model: 201 GiB of 128 GiB"
    dora = {"adapter": {"type": "lora", "use_dora": True}, "precision": "fp32"}
    fsdp2 = {"distributed": "fsdp2"}
    assert any(crowded in warning for warning in planned("a100x8", 8, **dora, **fsdp2).warnings)
    assert any(crowded in warning for warning in planned("a100x8", 8, adapter="none", distributed="ddp").warnings)
    offloaded = {"distributed": {"strategy": "fsdp2", "fsdp": {"cpu_offload": True}}}
    big = {**LLAMA_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    kept = "keep their shares of weights, gradients and optimizer state in main memory"
    assert any(kept in warning for warning in planned("a100x8", 8, big, adapter="none", **offloaded).warnings)
    for plan in (
        planned("a100x8", 8, adapter="none", **fsdp2),  # its rows only
        planned("a100x8", 8, adapter="lora"),  # as they are in the files
        planned("a100x8", 8, adapter="none", **offloaded),
        planned("a100", 1, adapter="none"),
    ):
        assert not any("main memory" in warning for warning in plan.warnings)


def test_shards_that_do_not_fit_may_go_to_main_memory_or_more_devices() -> None:
    big = {**LLAMA_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    reason = planned("a100x8", 8, big, adapter="none").memory.verdict.reason
    assert "more devices, distributed.fsdp.cpu_offload: true" in reason


def test_adafactor_is_not_sharded() -> None:
    adafactor = {"optim": "adafactor"}
    with pytest.raises(PlanError, match="whole rows and columns"):
        planned("a100x8", 8, adapter="none", training=adafactor, distributed={"strategy": "fsdp2"})
    chosen = planned("a100x8", 8, adapter="none", training=adafactor).distribution
    assert chosen.value == "ddp"


def test_gradients_are_summed_once_a_step_where_whole_ones_fit() -> None:
    def of(machine: str, adapter: str, asked: object = "auto", accumulation: int = 4) -> Plan:
        fsdp2 = {"strategy": "fsdp2", "fsdp": {"sync_each_batch": asked}}
        steps = {"gradient_accumulation_steps": accumulation}
        return planned(machine, int(machine[-1]), adapter=adapter, distributed=fsdp2, training=steps)

    def each(plan: Plan) -> bool:
        assert plan.parallel is not None
        return plan.parallel.sync_each.value

    assert not each(of("a100x8", "lora"))
    assert not each(of("h200x8", "none"))
    assert each(of("a100-40x4", "none"))
    assert each(of("a100x8", "lora", accumulation=1))
    each_time, once = (of("a100x8", "none", asked) for asked in (True, False))
    assert (each(each_time), each(once)) == (True, False)
    whole = each_time.num_trainable.value * 4
    assert 0.8 * whole < once.memory.gradients - each_time.memory.gradients < whole
