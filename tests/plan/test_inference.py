"""The plan of a result that answers: weights as they are stored, and training's own wishes have no say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from published import QWEN2_5_0_5B

from halftune.config.facts.model import facts_from_config
from halftune.config.run import RunConfig
from halftune.hardware.catalogue import lookup
from halftune.plan.inference import resolve_inference

NO_ADAPTER = {"type": "none"}


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {"model": {"name_or_path": "x"}, "data": {"train": ["d"]}, "training": {"output_dir": "r"}}
    return RunConfig.model_validate({**base, **sections})


def facts(dtype: str):
    return replace(facts_from_config(QWEN2_5_0_5B, "x"), dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_full_model_is_loaded_as_it_is_stored(dtype: str) -> None:
    plan = resolve_inference(config(precision=dtype, adapter=NO_ADAPTER), lookup("a100"), facts(dtype))
    assert plan.precision.storage.value == dtype
    assert plan.precision.trainable.value == dtype
    assert not plan.precision.autocast.value
    assert not plan.precision.grad_scaler.value
    assert plan.num_trainable.value == 0
    width = 4 if dtype == "fp32" else 2
    assert plan.memory.weights == facts(dtype).num_parameters * width
    assert (plan.memory.gradients, plan.memory.optimizer, plan.memory.checkpoint_disk) == (0, 0, 0)


@pytest.mark.parametrize(
    ("compute", "stored", "trainable", "autocast"),
    [("bf16", "fp32", "fp32", True), ("bf16", "bf16", "bf16", False), ("fp32", "bf16", "fp32", False)],
)
def test_an_adapter_keeps_its_format_where_the_compute_dtype_takes_it(
    compute: str, stored: Any, trainable: str, autocast: bool
) -> None:
    plan = resolve_inference(config(precision=compute), lookup("a100"), facts("bf16"), stored)
    assert plan.precision.storage.value == compute
    assert (plan.precision.trainable.value, plan.precision.autocast.value) == (trainable, autocast)


@pytest.mark.parametrize(
    "asked",
    [
        {"precision": {"compute": "fp32", "trainable": "bf16"}},
        {"training": {"output_dir": "r", "optim": "sgd"}, "precision": {"compute": "bf16", "optimizer_state": "bf16"}},
        {"distributed": {"strategy": "fsdp2", "num_processes": 8}},
        {"data": {"train": ["d"], "packing": True}},
    ],
    ids=str,
)
def test_what_only_training_asks_for_stops_no_answer(asked: dict[str, Any]) -> None:
    plan = resolve_inference(config(**asked), lookup("cpu" if "data" in asked else "a100"), facts("bf16"), "fp32")
    assert plan.parallel is None
    assert not plan.batch.packing.value
    assert plan.attention.varlen.value == "none"
