"""The Runs tab: every run on the disk, what the open ones do, their curves; starts what the Train tab has written."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune_webui.calls import told
from halftune_webui.context import Context, kept
from halftune_webui.runs.desk import MOST, Desk, View, act, refresh, start

EVERY = 1.5  # seconds between two looks at the disk
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def live(elem_id: str) -> gr.HTML:
    """An area of HTML that keeps scrolling and folding when it is written anew; ``submit`` tells of its buttons."""
    script = files("halftune_webui").joinpath("assets", "live.js").read_text(encoding="utf-8")
    return gr.HTML(html_template='<div class="ht-live"></div>', js_on_load=script, elem_id=elem_id)


def build(context: Context) -> None:
    """The list, the open runs, their curves, a report."""
    desk, words = Desk(context.settings, context.words), context.words
    view = gr.State(View())  # each page has its own, and changes it: an event never writes back one that it read before
    listed, cards = live("run-list"), live("run-cards")
    curves = gr.HTML(
        html_template='<div class="ht-charts"></div>',
        js_on_load=files("halftune_webui").joinpath("assets", "charts.js").read_text(encoding="utf-8"),
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

    def restored(seen: View, names: str) -> list[Any]:
        if names:
            seen.show([Path(name) for name in names.splitlines()[:MOST]])
        return looked(seen)

    gr.Timer(EVERY).tick(looked, view, areas, **_QUIET)
    for area in (listed, cards, report):
        # "multiple": a click while another one is being answered counts, too
        area.submit(acted, view, [*areas, report], trigger_mode="multiple", **_QUIET)
    context.start.click(started, [context.recipe, view], [context.tabs, *areas], **_QUIET)
    board = Blocks.root_block
    assert board is not None
    board.load(restored, [view, context.address], areas, js=kept("open", 1), **_QUIET)
