"""Every shipped recipe loads, passes every check and is planned on machines that most people have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published import QWEN2_5_0_5B

from halftune.config.facts import config_file as reader
from halftune.config.facts.of_recipe import model_facts
from halftune.config.load import load_config
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import explain, resolve

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
MACHINES = ("cpu", "t4", "a100", "h200")


def test_there_are_recipes() -> None:
    assert {"quickstart.yaml", "qwen_lora_bf16.yaml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_says_how_to_run_it(recipe: Path) -> None:
    first = recipe.read_text().splitlines()[0]
    assert first.startswith("#")
    assert f"--config configs/{recipe.relative_to(ROOT / 'configs')}" in first


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_planned(recipe: Path, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    monkeypatch.setattr(reader, "_from_hub", lambda name, revision: tmp_path / "config.json")
    loaded = load_config(recipe)
    facts = model_facts(loaded)
    if loaded.run.precision.compute == "bf16" and machine == "t4":
        with pytest.raises(PlanError, match="bf16") as refused:
            resolve(loaded.run, lookup(machine), facts)
        assert refused.value.remedy
        return
    assert loaded.run.model.name_or_path in explain(resolve(loaded.run, lookup(machine), facts))
