"""The Export tab: a run's result as a plain model, merged and checked in a process of its own."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from halftune.core.errors import HalftuneError
from halftune_webui.calls import told
from halftune_webui.context import Context
from halftune_webui.runs import export, launch
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.show import run_card
from halftune_webui.settings import Settings
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.runs import EVERY, live

_OWN = "own"


def build(context: Context) -> None:
    """Which run, where to, in which format; below what is being exported and what has been."""
    words, settings = context.words, context.settings
    listing = Listing(settings.runs)
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("export.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="exporting", elem_classes="ht-row"):
        run = chooser(context, listing, "export", "export-run")
        output = gr.Textbox(label=words("export.output"), info=words("export.output_help"), elem_id="export-output")
        formats = [(words("export.own"), _OWN), *((name, name) for name in export.DTYPES)]
        info = words("export.dtype_help")
        dtype = gr.Dropdown(formats, value=_OWN, label=words("export.dtype"), info=info, elem_id="export-dtype")
    with gr.Row(elem_id="export-go", elem_classes="ht-row"):
        force = gr.Checkbox(label=words("export.force"), elem_id="export-force")
        button = gr.Button(words("export.start"), variant="primary", elem_id="export-start")
    shown = live("exports")
    run.change(lambda name: f"models/{Path(name).name}" if name else "", run, output, show_progress="hidden")

    def cards() -> str:
        found = [(state, export.output_of(state.folder)) for state in export.exports(settings)]
        return "".join(
            run_card(state, (), log_tail(state.folder), settings.runs, words, output=output) for state, output in found
        )

    def start(name: str | None, target: str, stored: str, again: bool) -> str:
        try:
            found = launch.find(settings, name or "")
            export.start(settings, found, target, None if stored == _OWN else stored, force=again)
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
        return cards()

    def acted(event: gr.EventData) -> str:
        what, run = told(event, act=str, run=str)
        job = Path(run)
        try:
            if job in [state.folder for state in export.exports(settings)]:
                _act(settings, job, what)
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
        return cards()

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    button.click(start, [run, output, dtype, force], shown, **quiet)
    shown.submit(acted, None, shown, **quiet)
    gr.Timer(EVERY).tick(cards, None, shown, **quiet)


def _act(settings: Settings, job: Path, what: str) -> None:
    if what == "delete":
        launch.delete(settings, job)
    elif what in ("stop", "stop_at_once"):
        launch.stop(settings, job, at_once=what == "stop_at_once")
