"""Every shipped recipe loads, passes every check, and is planned: on what it names, or on machines that most have."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import transformers  # noqa: F401, each architecture is built here, not in a process of its own
import yaml

from halftune.cli import run_verb
from halftune.config.facts.model import read_model_facts
from halftune.config.facts.published import published_config
from halftune.config.load import load_config
from halftune.config.recipe_facts import model_facts
from halftune.config.recipes import beside, described, find, recipes
from halftune.config.sections.model import ModelSection
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import explain, resolve
from halftune.plan.memory import check_fits

ROOT = Path(__file__).resolve().parent.parent
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
    machine = lookup(SIZED[name].hardware)
    totals = []
    for words in ([], ["training.gradient_checkpointing=true"]):
        loaded = load_config(RECIPES[name], words)
        plan = resolve(loaded.run, machine, model_facts(loaded), len(machine.devices))
        check_fits(plan.memory, loaded.run)
        totals.append(plan.memory.total)
    assert SIZED[name].memory == round(min(totals) / 2**30, 1)


def test_a_recipe_is_copied_with_its_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_verb("recipes", ["copy", "grpo", "mine/a.yaml"]) == 0
    assert (tmp_path / "mine/a.yaml").read_bytes() == RECIPES["tiny/grpo.yaml"].read_bytes()
    assert load_config(tmp_path / "mine/a.yaml").run.method.type == "grpo"
    assert run_verb("recipes", ["copy", "configs/tiny/grpo.yaml", "mine/a.yaml"]) == 0  # the same bytes
    (tmp_path / "mine/a.yaml").write_text("changed")
    (tmp_path / "file").touch()
    for words in (
        ["copy", "grpo", "mine/a.yaml"],
        ["copy", "no-such"],
        ["copy"],
        ["move", "grpo"],
        ["copy", "grpo", "file/b.yaml"],
    ):
        assert run_verb("recipes", words) == 2
    assert run_verb("recipes", ["copy", "quickstart", "mine"]) == 0  # a folder, and what it depends on
    assert load_config(tmp_path / "mine/quickstart.yaml").run.depends_on
    assert (tmp_path / "mine/a.yaml").read_text() == "changed"
    capsys.readouterr()


def test_the_list_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("recipes", ["--method", "dpo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["method"] for one in found} == {"dpo"}
    assert run_verb("recipes", ["--memory", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(one["memory"] <= 24 for one in found)
    assert "llama/llama_3_1_8b_lora.yaml" in {one["name"] for one in found}
    assert {one["name"] for one in found} < set(RECIPES)
    for words in (["--method", "dpoo"], ["--memory", "nan"], ["--memory", "-1"]):
        with pytest.raises(SystemExit):
            run_verb("recipes", words)


def test_the_readme_shows_what_halftune_prints() -> None:
    readme = runpy.run_path(str(ROOT / "scripts" / "readme.py"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme["written"](text) == text


def test_a_plan_needs_no_hub(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The numbers come with halftune; what is missing is said after the plan, and is an error on this machine only."""
    words = ["--config", "qwen_lora_bf16", "precision=auto", f"training.output_dir={tmp_path}"]
    assert run_verb("plan", [*words, "--hardware", "t4"]) == 0
    there = capsys.readouterr()
    assert "Tesla T4" in there.out
    assert there.err.count("\n") == 1
    assert run_verb("plan", words) == 3
    here = capsys.readouterr()
    assert "494,032,768" in here.out
    assert "[model.hub_unreachable]" in here.err
    assert run_verb("train", words) == 3
    assert run_verb("plan", [*words, "--hardware", "t4", "model.revision=abc"]) == 3  # not the revision that is known
    capsys.readouterr()


PUBLISHED = yaml.safe_load((ROOT / "src/halftune/config/published/models.yaml").read_text())


@pytest.mark.parametrize("folder", PUBLISHED)
def test_published_numbers_are_complete(folder: str) -> None:
    names = PUBLISHED[folder]["names"]
    assert all(published_config(name) == published_config(name.upper()) for name in names)
    facts = read_model_facts(ModelSection(name_or_path=names[0]))
    assert facts.counted_in == "catalogue"
    assert facts.num_parameters + facts.tower_parameters == PUBLISHED[folder]["parameters"]
