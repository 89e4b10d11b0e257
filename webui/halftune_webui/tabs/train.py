"""The Train tab: a recipe as a form and as text, and at once what it will do on this machine or another."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.config.recipes import described, recipes
from halftune.core.errors import HalftuneError
from halftune.plan.explain import size
from halftune_webui import hub
from halftune_webui.calls import event_values
from halftune_webui.context import Context
from halftune_webui.hints import hints
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.plans.plan_panel import plan_panel
from halftune_webui.plans.planning import HERE, Outlook, machines, outlook
from halftune_webui.recipes.dependencies import needless
from halftune_webui.recipes.edits import edited
from halftune_webui.recipes.form import as_json, form
from halftune_webui.recipes.recipe import Examined, examine, shipped
from halftune_webui.recipes.state import form_state
from halftune_webui.runs.before_start import obstacles
from halftune_webui.runs.view.details import command_line
from halftune_webui.tabs.data import failed
from halftune_webui.tabs.live import live, script

FIRST, OWN = "own_data.yaml", "own"


@dataclass(frozen=True)
class _Parts:
    """The components that events write to."""

    form: gr.HTML
    plan: gr.HTML
    problems: gr.HTML


def build(context: Context) -> None:
    """Toolbar; the form on the left; plan and text on the right."""
    words = context.words
    with gr.Row(elem_id="toolbar"):
        pick = gr.Dropdown(_recipes(words), value=None, label=words("train.recipes"), elem_id="recipes")
        opened = gr.Button(words("train.open"), elem_id="open")
        download = gr.Button(words("train.download"), elem_id="download")
        context.start.render()
    with gr.Accordion(words("hub.title"), open=False, elem_id="hub"):
        query = gr.Textbox(label=words("hub.query"), info=words("hub.help"), elem_id="hub-query")
        model = gr.Dropdown([], label=words("hub.found"), elem_id="hub-found", visible=False)
        said = live("hub-said")
    problems = gr.HTML(elem_id="problems")
    with gr.Row(elem_id="workbench"):
        with gr.Column(scale=6, min_width=320):
            drawn = _form(context)
        with gr.Column(scale=5, min_width=320, elem_id="side"):
            machine = gr.Dropdown(_machines(words), value=HERE, label=words("plan.machine"), elem_id="machine")
            plan = gr.HTML(elem_id="plan", js_on_load=None)
            context.recipe.render()
            live("train-command", command_line("halftune train --config recipe.yaml", words))
    parts = _Parts(drawn, plan, problems)
    _wire(context, parts, machine, pick)
    _find_models(context, parts, machine, query, model, said)
    download.click(None, context.recipe, None, js=script("download_recipe"))
    opened.click(None, context.recipe, context.recipe, js=script("open_recipe")).then(
        lambda text, machine: _react(context, text, machine),
        [context.recipe, machine],
        [drawn, plan, problems, context.start],
        api_visibility="private",
    )


def _find_models(
    context: Context, parts: _Parts, machine: gr.Dropdown, query: gr.Textbox, model: gr.Dropdown, said: gr.HTML
) -> None:
    """A search on the hub, whose finds become the recipe's model."""
    words, quiet = context.words, dict[str, Any](show_progress="hidden", api_visibility="private")

    def searched(text: str | None) -> list[Any]:
        try:
            found = hub.search((text or "").strip())
        except HalftuneError as error:
            return [gr.Dropdown([], visible=False), failed(words.problem(error))]
        nothing = "" if found else f'<p class="help">{escape(words("hub.nothing"))}</p>'
        return [gr.Dropdown(found, value=None, visible=bool(found)), nothing]

    def taken(name: str | None, text: str, machine_name: str) -> tuple[Any, ...]:
        edit = {"op": "set", "field": "model.name_or_path", "value": name}
        changed = edited(text, [edit], context.settings) if name else text
        return changed, *_react(context, changed, machine_name)

    query.submit(searched, query, [model, said], **quiet)
    reactions = [context.recipe, parts.form, parts.plan, parts.problems, context.start]
    model.input(taken, [model, context.recipe, machine], reactions, **quiet)


def _recipes(words: Words) -> list[tuple[str, str]]:
    """Each with a sentence, or its model, method and memory: the one for own data first, the reader's own last."""
    about = words.below("recipes")

    def shown(name: str, path: Path) -> str:
        if path.stem in about:
            return f"{name} · {about[path.stem]}"
        one = described(name, path)
        needs = f"{one.hardware}, {one.memory:.1f} GiB" if one.memory else one.hardware
        return " · ".join((name, one.model, one.method, one.adapter, needs))

    names = sorted(recipes().items(), key=lambda item: item[0] != FIRST)
    return [*((shown(name, path), name) for name, path in names), (words("train.own"), OWN)]


def _form(context: Context) -> gr.HTML:
    words = context.words
    labels = {
        **words.below("form"),
        "groups": words.below("groups"),
        "fields": words.below("fields"),
        "help": words.below("help"),
        "files": words.below("files"),
    }
    drawing = script("form", GROUPS=as_json(form()), WORDS=labels, HINTS=hints(context.settings))
    return gr.HTML(
        html_template='<div class="ht-form"></div>',
        js_on_load=script("files") + drawing,
        elem_id="form",
    )


def _machines(words: Words) -> list[tuple[str, str]]:
    found = []
    for name, machine in machines().items():
        device = machine.devices[0]
        found.append((f"{device.name if name else words('plan.here')} · {size(device.memory_bytes)}", name))
    return found


def _wire(context: Context, parts: _Parts, machine: gr.Dropdown, pick: gr.Dropdown) -> None:
    recipe, start = context.recipe, context.start
    reactions = [parts.form, parts.plan, parts.problems, start]
    # past Gradio's queue: an answer is one request then, not one to ask and another one to listen
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}

    known = {shipped(name).strip(): name for name in recipes()}

    def name_of(text: str | None) -> str | None:
        """The recipe of ``configs/`` that this is; the reader's own as soon as it says anything else than that one."""
        return known.get((text or "").strip(), OWN)

    def react(text: str, name: str) -> tuple[Any, ...]:
        return name_of(text), *_react(context, text, name)

    def form_changed(text: str, name: str, event: gr.EventData) -> tuple[Any, ...]:
        edits, number = event_values(event, edits=list, seq=int)
        changed = edited(text, edits, context.settings)
        return changed, name_of(changed), *_react(context, changed, name, number)

    def picked(name: str | None, text: str, machine_name: str) -> tuple[Any, ...]:
        chosen = shipped(name) if name in recipes() else text
        return name_of(chosen), chosen, *_react(context, chosen, machine_name)

    def loaded(text: str, machine_name: str) -> tuple[Any, ...]:
        text = text or shipped(FIRST)
        return name_of(text), text, *_react(context, text, machine_name)

    parts.form.submit(form_changed, [recipe, machine], [recipe, pick, *reactions], trigger_mode="multiple", **quiet)
    recipe.input(react, [recipe, machine], [pick, *reactions], trigger_mode="always_last", **quiet)
    tab = Blocks.block
    assert isinstance(tab, gr.Tab)

    def opened(text: str | None, name: str) -> tuple[Any, ...]:
        # the page opens this tab before it has brought back its recipe: no recipe is none to look at, or to keep
        return react(text, name) if text else tuple(gr.skip() for _ in (pick, *reactions))

    # a run may have taken or left the folder meanwhile, or brought its recipe
    tab.select(opened, [recipe, machine], [pick, *reactions], **quiet)
    machine.input(react, [recipe, machine], [pick, *reactions], **quiet)
    ask = script("pick_recipe", SHIPPED=list(known), QUESTION=context.words("train.replace"), OWN=OWN)
    pick.input(picked, [pick, recipe, machine], [pick, recipe, *reactions], js=ask, **quiet)
    context.blocks.load(loaded, [recipe, machine], [pick, recipe, *reactions], js=script("restore_recipe"), **quiet)


def _react(context: Context, text: str, machine: str, seq: int = 0) -> tuple[Any, ...]:
    """Everything beside the text: the form, the plan, the list of problems, whether it can be started."""
    examined, elsewhere = examine(text or "", context.settings), machine != HERE
    planned = outlook(examined.loaded, machine) if examined.loaded is not None else None
    more = obstacles(examined, context.settings)
    problem = planned.problem if planned is not None else None
    here = problem.problems if problem is not None and not elsewhere else ()  # training starts on this machine
    found = (*examined.problems, *more, *here)
    device = machines()[machine].devices[0].name if elsewhere else ""
    return (
        form_state(examined, planned, context.words, seq, device, more),
        _panel(context, text or "", examined, planned, elsewhere=elsewhere),
        render("problems", found=found, words=context.words),
        gr.Button(interactive=not found),
    )


def _panel(context: Context, text: str, examined: Examined, planned: Outlook | None, *, elsewhere: bool) -> str:
    """The plan, and the trainings that come before it."""
    names = examined.loaded.run.depends_on if examined.loaded is not None else ()
    first = [Path(name).name for name in names]
    unused = [Path(name).name for name in needless(text, context.settings)] if first else []
    plan, problem = (planned.plan, planned.problem) if planned is not None else (None, None)
    return plan_panel(plan, problem, context.words, elsewhere=elsewhere, first=first, unused=unused)
