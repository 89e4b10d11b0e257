"""The Export tab: a run's result as what other programs load, written and checked in processes of their own."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.quantities import size
from halftune_webui.calls import event_values
from halftune_webui.context import Context
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.runs import start_stop
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.results import check, export
from halftune_webui.runs.results.job import answered
from halftune_webui.runs.state import RunState, is_live, is_run
from halftune_webui.runs.view.show import run_card
from halftune_webui.runs.view.verdict import verdict_view
from halftune_webui.settings import Settings
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.data import failed
from halftune_webui.tabs.live import live, only_while_shown
from halftune_webui.tabs.runs import EVERY

_OWN = "own"
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


def build(context: Context) -> None:
    """Which run, as what, where to, in which format; below what is being exported and what has been."""
    words, settings = context.words, context.settings
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("export.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="exporting", elem_classes="ht-row"):
        run = chooser(context, "export")
        names = [(_label(name, words), name) for name in export.targets(settings)]
        info = words("export.target_help")
        target = gr.Dropdown(
            names, value=export.FOLDER, label=words("export.target"), info=info, elem_id="export-target"
        )
        dtype = _formats(export.FOLDER, settings, words)
        output = gr.Textbox(label=words("export.output"), info=words("export.output_help"), elem_id="export-output")
    with gr.Row(elem_id="export-go", elem_classes="ht-row"):
        force = gr.Checkbox(label=words("export.force"), elem_id="export-force")
        button = gr.Button(words("export.start"), variant="primary", elem_id="export-start")
    said, shown = live("export-said"), live("exports")

    def retargeted(name: str | None, kind: str | None) -> list[Any]:
        return [_formats(kind, settings, words), _place(name, kind)]

    run.change(_place, [run, target], output, show_progress="hidden")
    target.change(retargeted, [run, target], [dtype, output], **_QUIET)

    def start(name: str | None, kind: str | None, folder: str, stored: str | None, again: bool) -> list[str]:
        how = words("export.tick", label=words("export.force"))
        asked = (folder or "", kind or "", None if stored in (_OWN, None) else stored)
        try:
            export.start(settings, start_stop.find(settings, name or ""), *asked, force=again, how=how)
        except HalftuneError as error:
            return [failed(words.problem(error)), _cards(settings, words)]
        return ["", _cards(settings, words)]

    def acted(event: gr.EventData) -> list[str]:
        what, name = event_values(event, act=str, run=str)
        job, problem = Path(name), ""
        try:
            if job in [state.folder for state in export.exports(settings)]:
                _act(settings, job, what)
        except HalftuneError as error:
            problem = failed(words.problem(error))
            gr.Warning(escape(words.problem(error)))  # the card may lie far below
        return [problem, _cards(settings, words)]

    button.click(start, [run, target, output, dtype, force], [said, shown], **_QUIET)
    shown.submit(acted, None, [said, shown], **_QUIET)
    clock = gr.Timer(EVERY, active=False)
    clock.tick(lambda: _cards(settings, words), None, shown, **_QUIET, queue=False)
    only_while_shown(context, clock, "export")


def _label(target: str, words: Words) -> str:
    return words.table.get(f"export.targets.{target}", target)


def _place(run: str | None, target: str | None) -> str:
    """Where a run's export goes unless the reader says otherwise."""
    kind = "" if target in (export.FOLDER, None) else f"-{target}"
    return f"models/{Path(run).name}{kind}" if run else ""


def _formats(target: str | None, settings: Settings, words: Words) -> gr.Dropdown:
    """The formats of a target's weights; hidden where it has no choice."""
    row = export.targets(settings).get(target or "", export.Target())
    first = words("export.own" if target == export.FOLDER else "export.usual")
    names = [(first, _OWN), *((name, name) for name in row.formats)]
    label, info = words("export.dtype"), words("export.dtype_help")
    return gr.Dropdown(
        names, value=_OWN, label=label, info=info, elem_id="export-dtype", visible=bool(row.formats), interactive=True
    )


def _cards(settings: Settings, words: Words) -> str:
    return "".join(_card(state, settings, words) for state in export.exports(settings))


def _card(state: RunState, settings: Settings, words: Words) -> str:
    """An export: how it goes, where its result lies, and what its check says."""
    job, output = state.folder, export.output_of(state.folder)
    card = run_card(state, (), log_tail(job), settings.runs, words, output=output)
    verdict, checking, folder = "", False, check.folder_of_check(job)
    if is_run(folder):
        stand, answer = answered(folder)
        verdict, checking = verdict_view(str(job), stand, answer, log_tail(folder), words), stand.live
    target, stored = export.target_of(settings, job)
    what = " ".join(part for part in (_label(target, words), stored) if part)
    of = {"job": job, "run": export.run_of(job), "output": output, "size": size(export.size_of(Path(output)))}
    shown = {"card": card, "done": state.state == "finished", "verdict": verdict, "checking": checking, "what": what}
    return render("export", **shown, **of, words=words)


def _act(settings: Settings, job: Path, what: str) -> None:
    checking = check.folder_of_check(job)
    if what == "delete":
        if is_live(checking):
            what, remedy = "the export is being checked", "stop the check first"
            raise ConfigError(what, remedy=remedy, code="webui.run_active")
        start_stop.delete(settings, job)
    elif what in ("stop", "stop_at_once"):
        start_stop.stop(settings, job, at_once=what == "stop_at_once")
    elif what == "check":
        check.start(settings, job)
    elif what == "stop_check":
        start_stop.stop(settings, checking)
