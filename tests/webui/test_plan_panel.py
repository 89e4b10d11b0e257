"""The plan on the page: what cannot run says why, nothing of a recipe becomes HTML, torch stays out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halftune_webui.labels import load_words
from halftune_webui.plans.plan_panel import plan_panel
from halftune_webui.plans.planning import Outlook, machines, outlook
from halftune_webui.recipes.recipe import examine
from halftune_webui.recipes.state import form_state
from halftune_webui.settings import Settings

GOOD = (
    "model: {name_or_path: builtin:qwen2-small}\ndata: {train: builtin:python-docs}\ntraining: {output_dir: runs/x}\n"
)
HERE = Settings((Path.cwd().resolve(),), Path("runs"))


def planned(text: str, machine: str) -> Outlook:
    loaded = examine(text, HERE).loaded
    assert loaded is not None
    return outlook(loaded, machine)


def test_impossible_choices_say_why() -> None:
    t4 = planned(GOOD, "t4")
    assert list(t4.impossible["precision.compute"]) == ["bf16"]
    assert "7.5" in t4.impossible["precision.compute"]["bf16"]
    assert {"fa3", "fa4"} <= set(t4.impossible["attention.backend"])
    assert not planned(GOOD, "h200").impossible["precision.compute"]


def test_precision_is_marked_by_the_machine_and_not_by_the_attention() -> None:
    """fa2 cannot run on a CPU at all; that says nothing against bf16."""
    marked = planned(GOOD + "attention: fa2\n", "cpu-amx")
    assert marked.plan is None
    assert marked.problem is not None
    assert "fa2 is unavailable" in marked.problem.what
    assert "bf16" not in marked.impossible["precision.compute"]


@pytest.mark.parametrize("machine", sorted(machines()))
def test_panel_for_every_machine(machine: str) -> None:
    found = planned(GOOD, machine)
    text = plan_panel(found.plan, found.problem, load_words("en"), elsewhere=bool(machine))
    assert found.plan is not None
    for name in ("compute", "storage", "trainable", "reduce", "optimizer_state", "softmax", "linear"):
        assert f'data-plan="{name}"' in text
    assert found.plan.precision.compute.reason.split("<")[0].split("'")[0] in text


@pytest.mark.parametrize("recipe", [GOOD, GOOD + "precision: bf16\n"])  # fits; a T4 cannot run it
def test_the_line_of_a_narrow_screen_says_that_it_is_of_another_machine(recipe: str) -> None:
    found, words = planned(recipe, "t4"), load_words("en")
    assert (found.plan is None) == ("bf16" in recipe)
    here, there = (plan_panel(found.plan, found.problem, words, elsewhere=one) for one in (False, True))
    mark = words("plan.brief_elsewhere", text="")
    assert mark not in here
    assert mark in there[there.index("ht-brief") :]


def test_bar_is_as_long_as_the_need() -> None:
    large = planned(GOOD + "adapter: none\n", "t4")
    assert large.plan is not None
    text = plan_panel(large.plan, None, load_words("en"), elsewhere=True)
    widths = [float(part.split("%")[0]) for part in text.split("width:")[1:]]
    assert sum(widths) == pytest.approx(100 * large.plan.memory.total / large.plan.memory.available, abs=0.1)


def test_names_are_text_and_never_markup() -> None:
    text = GOOD.replace("builtin:qwen2-small", "'<img src=x onerror=alert(1)>'")
    examined = examine(text, HERE)
    found = planned(text, "")
    assert "<img" not in plan_panel(found.plan, found.problem, load_words("en"), elsewhere=False)
    assert json.loads(form_state(examined, found, load_words("en")))["problems"]["model.name_or_path"]


def test_problem_of_the_plan_stands_beside_its_field() -> None:
    text = GOOD + "precision: bf16\n"
    state = json.loads(form_state(examine(text, HERE), planned(text, "t4"), load_words("en")))
    assert "bf16 is unavailable" in state["problems"]["precision.compute"][0]
    state = json.loads(form_state(examine("training: 3\n", HERE), None, load_words("en")))
    assert set(state["problems"]) == {"model.name_or_path", "data.train", "training.output_dir"}


def test_planning_needs_neither_torch_nor_gradio() -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from halftune_webui import settings;"
        "from halftune_webui.plans import planning, plan_panel; from halftune_webui.recipes import recipe, state;"
        f"e = recipe.examine({GOOD!r}, settings.Settings((Path.cwd(),), Path('runs')));"
        "planning.outlook(e.loaded, ''); planning.outlook(e.loaded, 'h200');"
        "print(sorted({'torch', 'transformers', 'gradio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
