"""The Runs tab: every run on the disk, what the open ones do, their curves; starts what the Train tab has written."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune.train.report.series import chart_script
from halftune_webui.calls import event_values
from halftune_webui.context import Context, kept
from halftune_webui.labels import Words
from halftune_webui.runs.controller import FILTERS, Done, RunsController, View, act, refresh, start
from halftune_webui.tabs.choose import chosen
from halftune_webui.tabs.live import live, only_while_shown, script

EVERY = 2.0  # seconds between two looks at the disk
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_AT_ONCE: dict[str, Any] = {**_QUIET, "queue": False}  # one request, past Gradio's queue; but no message can be shown


def build(context: Context) -> None:
    """Search, the list, the curves and cards of the runs that are ticked, a report."""
    words = context.words
    controller = RunsController(context.settings, words, context.listing, fresh=0.9 * EVERY)
    view = gr.State(View())  # each page has its own, and changes it: an event never writes back one that it read before
    query, kind = _search(words)
    gpus = live("gpus")
    listed = live("run-list")
    curves = _charts(words)
    cards, report = live("run-cards"), live("run-report")
    areas, lists = [listed, cards, curves, gpus], list(context.choosers.values())

    def looked(seen: View) -> list[Any]:
        return _areas(controller, seen)

    def searched(seen: View, text: str | None, state: str | None) -> list[Any]:
        seen.search(text or "", state or "")
        return looked(seen)

    def acted(seen: View, event: gr.EventData) -> list[Any]:
        done, (what, run, on, text) = Done(), event_values(event, act=str, run=str, on=bool, text=str)
        try:
            done = act(controller, seen, what, run, on, text)
        except HalftuneError as error:
            gr.Warning(escape(error.report()))
        if done.said:
            gr.Info(escape(done.said))
        return [*looked(seen), *_after(context, controller, done)]

    def started(text: str | None, seen: View) -> list[Any]:
        try:
            gr.Info(escape(start(controller, seen, text or "")))
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
            return [gr.skip()] * (1 + len(areas))
        return [gr.Tabs(selected="runs"), *looked(seen)]

    def restored(seen: View, names: str) -> list[Any]:
        seen.restore([Path(name) for name in names.splitlines()])
        return looked(seen)

    clock = gr.Timer(EVERY, active=False)
    clock.tick(looked, view, areas, **_AT_ONCE)
    only_while_shown(context, clock, "runs")
    for area in (listed, cards, report):
        # "multiple": a click while another one is being answered counts, too
        area.submit(
            acted, view, [*areas, report, context.tabs, context.recipe, *lists], trigger_mode="multiple", **_QUIET
        )
    query.change(searched, [view, query, kind], areas, trigger_mode="always_last", **_AT_ONCE)
    kind.change(searched, [view, query, kind], areas, trigger_mode="always_last", **_AT_ONCE)
    context.start.click(started, [context.recipe, view], [context.tabs, *areas], **_QUIET)
    context.blocks.load(restored, [view, context.address], areas, js=kept("open", 1), **_AT_ONCE)
    tab = Blocks.block
    assert isinstance(tab, gr.Tab)
    tab.select(looked, view, areas, **_AT_ONCE)


def _areas(controller: RunsController, view: View) -> list[Any]:
    return [gr.skip() if area is None else area for area in refresh(controller, view)]


def _after(context: Context, controller: RunsController, done: Done) -> list[Any]:
    """What a button does beside the lists: to the report, the open tab, the recipe, and the run chosen in that tab."""
    opened = {done.tab: [str(done.run)]}
    return [
        gr.skip() if done.report is None else done.report,
        gr.Tabs(selected=done.tab) if done.tab else gr.skip(),
        gr.skip() if done.recipe is None else done.recipe,
        *(
            chosen(opened[tab], controller.states(), context.settings, context.words, tab)
            if tab in opened
            else gr.skip()
            for tab in context.choosers
        ),
    ]


def _search(words: Words) -> tuple[gr.Textbox, gr.Dropdown]:
    """What is looked for, and the states that are shown."""
    with gr.Row(elem_id="run-search", elem_classes="ht-row"):
        query = gr.Textbox(label=words("runs.search"), elem_id="run-query")
        kinds = [(words("runs.all"), ""), *((words(f"runs.kinds.{name}"), name) for name in FILTERS)]
        return query, gr.Dropdown(kinds, value="", label=words("runs.state"), elem_id="run-kind")


def _charts(words: Words) -> gr.HTML:
    labels = {**words.below("curves"), "axes": words.below("curves.axes")}
    return gr.HTML(
        html_template='<div class="ht-charts"></div>',
        js_on_load=script("charts", WORDS=json.dumps(labels)).replace("/* charts */", chart_script()),
        elem_id="curves",
    )
