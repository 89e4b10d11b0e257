"""What is found out at the start of a run makes its plan final."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halftune.config.facts.model import facts_from_config
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import ConfigError, PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import Plan, resolve
from halftune.plan.finalise import Evidence, ResumedBatch, finalise

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": 512},
}
LEAKS = Choice(False, "the copy leaked")


def planned(processes: int = 1, **method: Any) -> Plan:
    tree = {
        "model": {"name_or_path": "tiny"},
        "data": {"train": ["data.jsonl"], "packing": not method, "max_length": 128},
        "training": {"output_dir": "x", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        **({"method": method} if method else {}),
    }
    return resolve(RunConfig.model_validate(tree), lookup("8xh100"), facts_from_config(LLAMA, "tiny"), processes)


def test_no_evidence_leaves_the_plan_as_it_is() -> None:
    plan = planned()
    assert finalise(plan, Evidence()) == plan
    assert finalise(plan, Evidence(packing=Choice(True, "kept apart"), packing_asked=True)) == plan


def test_packing_that_was_asked_for_and_leaks_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        finalise(planned(), Evidence(packing=LEAKS, packing_asked=True))
    assert raised.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize(("processes", "split"), [(8, (4, 2)), (4, (4, 4)), (16, (4, 1)), (64, (1, 1))])
def test_the_global_batch_of_a_checkpoint_is_kept(processes: int, split: tuple[int, int]) -> None:
    resumed = ResumedBatch(Path("checkpoint-3"), rows=64, processes=8)
    plan = finalise(planned(processes), Evidence(packing=LEAKS, resumed=resumed))
    assert (plan.batch.micro_batch, plan.batch.accumulation) == split
    assert plan.batch.packing == LEAKS
    assert plan.attention.varlen.value == "none"
    assert any("the copy leaked" in said for said in plan.warnings)


def test_processes_that_cannot_share_the_global_batch_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        finalise(planned(3), Evidence(resumed=ResumedBatch(Path("checkpoint-3"), rows=64, processes=8)))
    assert raised.value.code == "train.rows_not_divisible"


def test_the_memory_of_the_loss_follows_the_share_of_labelled_tokens() -> None:
    answers, everything = planned(type="sft"), planned(type="sft", train_on="all")
    assert answers.memory.logits < everything.memory.logits == planned(type="pretrain").memory.logits
