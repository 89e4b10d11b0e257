"""The Export tab: a run's result as a plain model, merged and checked in a process of its own."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from halftune.core.errors import HalftuneError
from halftune.plan.explain import size
from halftune_webui.calls import event_values
from halftune_webui.context import Context
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.runs import export, start_stop
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.state import RunState
from halftune_webui.runs.view.show import run_card
from halftune_webui.settings import Settings
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.data import failed
from halftune_webui.tabs.live import live, only_while_shown
from halftune_webui.tabs.runs import EVERY

_OWN = "own"


def build(context: Context) -> None:
    """Which run, where to, in which format; below what is being exported and what has been."""
    words, settings = context.words, context.settings
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("export.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="exporting", elem_classes="ht-row"):
        run = chooser(context, "export")
        output = gr.Textbox(label=words("export.output"), info=words("export.output_help"), elem_id="export-output")
        formats = [(words("export.own"), _OWN), *((name, name) for name in export.DTYPES)]
        info = words("export.dtype_help")
        dtype = gr.Dropdown(formats, value=_OWN, label=words("export.dtype"), info=info, elem_id="export-dtype")
    with gr.Row(elem_id="export-go", elem_classes="ht-row"):
        force = gr.Checkbox(label=words("export.force"), elem_id="export-force")
        button = gr.Button(words("export.start"), variant="primary", elem_id="export-start")
    said, shown = live("export-said"), live("exports")
    run.change(lambda name: f"models/{Path(name).name}" if name else "", run, output, show_progress="hidden")

    def cards() -> str:
        return _cards(settings, words)

    def start(name: str | None, target: str | None, stored: str, again: bool) -> list[str]:
        how = words("export.tick", label=words("export.force"))
        try:
            found = start_stop.find(settings, name or "")
            export.start(settings, found, target or "", None if stored == _OWN else stored, force=again, how=how)
        except HalftuneError as error:
            return [failed(words.problem(error)), cards()]
        return ["", cards()]

    def acted(event: gr.EventData) -> str:
        what, run = event_values(event, act=str, run=str)
        job = Path(run)
        try:
            if job in [state.folder for state in export.exports(settings)]:
                _act(settings, job, what)
        except HalftuneError as error:
            gr.Warning(escape(error.report()))
        return cards()

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    button.click(start, [run, output, dtype, force], [said, shown], **quiet)
    shown.submit(acted, None, shown, **quiet)
    clock = gr.Timer(EVERY, active=False)
    clock.tick(cards, None, shown, **quiet, queue=False)
    only_while_shown(context, clock, "export")


def _cards(settings: Settings, words: Words) -> str:
    return "".join(_card(state, settings, words) for state in export.exports(settings))


def _card(state: RunState, settings: Settings, words: Words) -> str:
    """An export: how it goes, and where its result lies."""
    output = export.output_of(state.folder)
    card = run_card(state, (), log_tail(state.folder), settings.runs, words, output=output)
    if state.state != "finished":
        return card
    size_of = size(export.size_of(Path(output)))
    return render("export", card=card, output=output, size=size_of, run=export.run_of(state.folder), words=words)


def _act(settings: Settings, job: Path, what: str) -> None:
    if what == "delete":
        start_stop.delete(settings, job)
    elif what in ("stop", "stop_at_once"):
        start_stop.stop(settings, job, at_once=what == "stop_at_once")
