"""The Runs tab: every run on the disk, what the open ones do, their curves; starts what the Train tab has written."""

from __future__ import annotations

import json
from html import escape
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune_webui.calls import told
from halftune_webui.context import Context
from halftune_webui.runs.desk import Desk, View, act, refresh, start
from halftune_webui.tabs.live import live, script

EVERY = 1.5  # seconds between two looks at the disk
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def build(context: Context) -> None:
    """The list, the open runs, their curves, a report."""
    desk, words = Desk(context.settings, context.words), context.words
    view = gr.State(View())  # each page has its own, and changes it: an event never writes back one that it read before
    listed, cards = live("run-list"), live("run-cards")
    curves = gr.HTML(
        html_template='<div class="ht-charts"></div>',
        js_on_load=script("charts"),
        elem_id="curves",
        words=json.dumps(words.below("curves")),
    )
    report = live("run-report")
    areas = [listed, cards, curves]

    def looked(seen: View) -> list[Any]:
        return [gr.skip() if area is None else area for area in refresh(desk, seen)]

    def acted(seen: View, event: gr.EventData) -> list[Any]:
        shown, (what, run, on) = None, told(event, act=str, run=str, on=bool)
        try:
            shown = act(desk, seen, what, run, on)
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
        return [*looked(seen), gr.skip() if shown is None else shown]

    def started(text: str | None, seen: View) -> list[Any]:
        try:
            gr.Info(escape(start(desk, seen, text or "")))
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
            return [gr.skip() for _ in (context.tabs, *areas)]
        return [gr.Tabs(selected="runs"), *looked(seen)]

    gr.Timer(EVERY).tick(looked, view, areas, **_QUIET)
    for area in (listed, cards, report):
        # "multiple": a click while another one is being answered counts, too
        area.submit(acted, view, [*areas, report], trigger_mode="multiple", **_QUIET)
    context.start.click(started, [context.recipe, view], [context.tabs, *areas], **_QUIET)
    board = Blocks.root_block
    assert board is not None
    board.load(looked, view, areas, **_QUIET)
