"""Before anything heavy, processes compare what they are; who differs is named, and the weakest device decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from halftune.config.facts.model import facts_from_config
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.core.processes.failures import PeerLost
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.train.parallel.preflight import compare, differences, own_facts
from halftune.train.parallel.rendezvous import Rendezvous

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
FACTS = facts_from_config(QWEN, "x/y")


def config(**sections: Any) -> RunConfig:
    tree = {"model": {"name_or_path": "x/y"}, "data": {"train": ["x"]}, "training": {"output_dir": "runs/x"}}
    return RunConfig.model_validate({**tree, **sections})


def told(machine: str, rank: int = 0, **sections: Any) -> dict[str, Any]:
    return {**own_facts(config(**sections), lookup(machine), FACTS), "host": f"machine-{rank}"}


def meetings(count: int) -> list[Rendezvous]:
    store = dist.HashStore()
    return [Rendezvous(store, rank, count) for rank in range(count)]


def test_equal_processes_agree_whatever_their_number_is() -> None:
    machines = {"num_machines": 2, "main_process_ip": "x"}
    one, other = (told("a100", rank, distributed={**machines, "machine_rank": rank}) for rank in (0, 1))
    assert differences([one, other]) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"torch": "2.0"}}, "torch 2.0"),
        ({"configuration": {"training.seed": 7}}, "training.seed: 7, rank 0 has "),
        ({"model": "another"}, "another model"),
    ],
)
def test_who_differs_is_named(change: dict[str, Any], said: str) -> None:
    odd = told("a100", 2)
    for name, value in change.items():
        odd[name] = {**odd[name], **value} if isinstance(value, dict) else value
    found = differences([told("a100"), told("a100", 1), odd])
    assert found.startswith("rank 2 on machine-2 has")
    assert said in found


def test_another_recipe_and_another_kind_of_device_differ() -> None:
    seeds = [told("a100", rank, training={"output_dir": "runs/x", "seed": rank}) for rank in (0, 1)]
    assert "rank 1 on machine-1 has training.seed: 1, rank 0 has 0" in differences(seeds)
    assert "rank 1 on machine-1 computes on cpu" in differences([told("a100"), told("cpu", 1)])


def test_the_weakest_device_decides_for_all(caplog: pytest.LogCaptureFixture) -> None:
    here, there = meetings(2)
    there.tell("facts", told("t4", 1))
    hardware = lookup("a100")
    plan = resolve(config(), hardware, FACTS, world_size=2)
    assert plan.precision.compute.value == "bf16"
    with caplog.at_level("INFO"):
        agreed = compare(here, config(), hardware, FACTS, plan)
    assert agreed.precision.compute.value == "fp16"
    assert "Tesla T4" in agreed.precision.compute.reason
    assert "rank 1 on machine-1 has the weakest device, Tesla T4" in caplog.text
    assert agreed.batch.world_size == 2


def test_equal_devices_leave_the_plan_alone() -> None:
    here, there = meetings(2)
    there.tell("facts", told("a100", 1))
    plan = resolve(config(), lookup("a100"), FACTS, world_size=2)
    assert compare(here, config(), lookup("a100"), FACTS, plan) is plan


def test_disagreement_is_an_error_on_every_process() -> None:
    here, there = meetings(2)
    there.tell("facts", {**told("a100", 1), "model": "another"})
    plan = resolve(config(), lookup("a100"), FACTS, world_size=2)
    with pytest.raises(PlanError, match="rank 1 on machine-1 has another model"):
        compare(here, config(), lookup("a100"), FACTS, plan)


def test_who_does_not_come_is_named() -> None:
    here, _ = meetings(2)
    here.tell("facts", told("a100"))
    with pytest.raises(PeerLost, match="rank 1 "):
        here.ask("facts", 0.05)
