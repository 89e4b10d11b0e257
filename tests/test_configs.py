"""Every shipped recipe loads, passes every check, and is planned: on what it names, or on machines that most have."""

from __future__ import annotations

import pytest

from halftune.config.facts.of_recipe import model_facts
from halftune.config.load import load_config
from halftune.config.recipes import beside, described, find, recipes
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import explain, resolve
from halftune.plan.memory import check_fits

RECIPES = recipes()
MACHINES = ("cpu", "t4", "a100", "h200")
SIZED = {name: found for name, path in RECIPES.items() if (found := described(name, path)).memory}


def test_there_are_recipes() -> None:
    assert {"quickstart.yaml", "qwen_lora_bf16.yaml", "tiny/grpo.yaml"} <= RECIPES.keys()
    assert len(SIZED) >= 20
    assert [path.name for path in beside(RECIPES["tiny/grpo.yaml"])] == ["rewards.py"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_says_how_to_run_it(name: str) -> None:
    first = RECIPES[name].read_text().splitlines()[0]
    assert first.startswith("#")
    assert f"--config configs/{name}" in first


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_found_by_its_name(name: str) -> None:
    path = RECIPES[name]
    assert find(path.relative_to(path.parent).with_suffix("")) == path


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SIZED])
def test_recipe_is_planned(name: str, machine: str) -> None:
    loaded = load_config(RECIPES[name])
    facts = model_facts(loaded)
    if loaded.run.precision.compute == "bf16" and machine == "t4":
        with pytest.raises(PlanError, match="bf16") as refused:
            resolve(loaded.run, lookup(machine), facts)
        assert refused.value.remedy
        return
    assert loaded.run.model.name_or_path in explain(resolve(loaded.run, lookup(machine), facts))


@pytest.mark.parametrize("name", SIZED)
def test_recipe_needs_the_memory_that_it_names(name: str) -> None:
    """On the hardware that it names, from the model's published numbers."""
    run = load_config(RECIPES[name]).run
    machine = lookup(SIZED[name].hardware)
    plan = resolve(run, machine, model_facts(load_config(RECIPES[name])), len(machine.devices))
    check_fits(plan.memory, run)
    assert SIZED[name].memory == round(plan.memory.total / 2**30, 1)
