"""The Evaluate tab: finished runs beside their base models, measured in a process of its own; past evaluations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune_webui.calls import event_values
from halftune_webui.context import Context, kept
from halftune_webui.hints import hints
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.runs import start_stop
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.results import evaluation
from halftune_webui.runs.view.scores import scores_of
from halftune_webui.runs.view.show import name_of
from halftune_webui.runs.view.verdict import failure_of
from halftune_webui.settings import Settings
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.data import failed
from halftune_webui.tabs.live import live, only_while_shown
from halftune_webui.tabs.runs import EVERY

_ANSWERS = 6  # rows of answers that are shown
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


@dataclass
class View:
    """What one page shows.

    Attributes:
        opened: name of the job folder that is open; empty for the newest one.
        shown: counts what the reader has opened, which the page then scrolls to.
        sent: the list and the open evaluation as they were sent last.
    """

    opened: str = ""
    shown: int = 0
    sent: list[str] = field(default_factory=lambda: ["", ""])


def build(context: Context) -> None:
    """Which runs, on which data, by which metrics; below the evaluations, and the one that is open."""
    words, settings = context.words, context.settings
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("evaluate.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="evaluating", elem_classes="ht-row"):
        runs = chooser(context, "evaluate")
        label, info = words("evaluate.data"), words("evaluate.data_help")
        data = gr.Dropdown(
            _sources(settings, words),
            value="",
            allow_custom_value=True,
            label=label,
            info=info,
            elem_id="evaluate-data",
        )
        label, info = words("evaluate.limit"), words("evaluate.limit_help")
        limit = gr.Number(value=0, precision=0, minimum=0, label=label, info=info, elem_id="evaluate-limit")
    with gr.Row(elem_id="evaluate-go", elem_classes="ht-row"):
        names = [(words(f"evaluate.metrics.{name}"), name) for name in evaluation.METRICS]
        info = words("evaluate.metrics_help")
        metrics = gr.CheckboxGroup(names, label=words("evaluate.answered"), info=info, elem_id="evaluate-metrics")
        base = gr.Checkbox(value=True, label=words("evaluate.base"), elem_id="evaluate-base")
        button = gr.Button(words("evaluate.start"), variant="primary", elem_id="evaluate-start")
    said, areas = live("evaluate-said"), [live("evaluations"), live("evaluation")]
    _wire(context, button, [runs, data, limit, metrics, base], said, areas)
    context.blocks.load(lambda: gr.Dropdown(_sources(settings, words)), None, data, queue=False, **_QUIET)


def _wire(context: Context, button: gr.Button, inputs: list[Any], said: gr.HTML, areas: list[gr.HTML]) -> None:
    words, settings, view = context.words, context.settings, gr.State(View())

    def look(seen: View) -> list[Any]:
        before, seen.sent = seen.sent, _areas(seen, settings, words)
        return [gr.skip() if now == then else now for now, then in zip(seen.sent, before, strict=True)]

    def start(
        seen: View, names: list[str] | None, asked: Any, most: float | None, chosen: list[str], beside: bool
    ) -> list[Any]:
        how = {"base": beside, "data": str(asked or "").strip(), "metrics": chosen, "limit": int(most or 0)}
        try:
            job = evaluation.start(settings, names or [], **how)
        except HalftuneError as error:
            return [failed(words.problem(error)), *look(seen)]
        seen.opened, seen.shown = job.name, seen.shown + 1
        return ["", *look(seen)]

    def acted(seen: View, event: gr.EventData) -> list[Any]:
        what, name = event_values(event, act=str, run=str)
        try:
            _act(settings, seen, what, Path(name))
        except HalftuneError as error:
            gr.Warning(escape(words.problem(error)))
        return look(seen)

    def restored(seen: View, name: str) -> list[Any]:
        seen.opened = seen.opened or name
        seen.sent = ["", ""]  # an answer that came before the page was whole may not have been drawn
        return look(seen)

    button.click(start, [view, *inputs], [said, *areas], **_QUIET)
    for area in areas:
        area.submit(acted, view, areas, **_QUIET)
    clock = gr.Timer(EVERY, active=False)
    clock.tick(look, view, areas, **_QUIET, queue=False)
    only_while_shown(context, clock, "evaluate")
    tab = Blocks.block
    assert isinstance(tab, gr.Tab)
    for shown in (context.blocks.load, tab.select):
        shown(restored, [view, context.address], areas, js=kept("evaluation", 1), queue=False, **_QUIET)


def _sources(settings: Settings, words: Words) -> list[tuple[str, str]]:
    """The run's own data, and what the form suggests, too."""
    return [(words("evaluate.own"), ""), *((name, name) for name in hints(settings)["data.eval.path"])]


def _areas(seen: View, settings: Settings, words: Words) -> list[str]:
    """The list, and the open evaluation; the newest one where none is open."""
    jobs = evaluation.evaluations(settings)
    listed = []
    for job in jobs:
        state, _ = evaluation.stand(job)
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began))
        one = {"job": str(job), "name": _name(job, settings), "data": evaluation.data_of(job) or words("evaluate.own")}
        listed.append({**one, "state": state, "began": began})
    opened = next((job for job in jobs if job.name == seen.opened), jobs[0] if jobs else None)
    card = "" if opened is None else _card(opened, seen, settings, words)
    return [render("evaluations", listed=listed, opened=str(opened or ""), words=words), card]


def _card(job: Path, seen: View, settings: Settings, words: Words) -> str:
    state, answer = evaluation.stand(job)
    problems, scores = failure_of(state, answer, words), None
    if not state.live and not problems:
        try:
            scores = scores_of(
                answer,
                lambda name: evaluation.read_file(job, name),
                lambda name: evaluation.answers(job, name, _ANSWERS),
                words,
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):  # the file may be anybody's
            problems = words("check.unreadable")
    shown = {"state": state, "problems": problems, "scores": scores, "log": log_tail(job), "of": None}
    data = evaluation.data_of(job) or words("evaluate.own")
    return render(
        "evaluation",
        **shown,
        title=_name(job, settings),
        data=data,
        shown=seen.opened if seen.shown else "",
        words=words,
    )


def _name(job: Path, settings: Settings) -> str:
    return ", ".join(name_of(run, settings.runs) for run in evaluation.runs_of(job)) or job.name


def _act(settings: Settings, seen: View, what: str, job: Path) -> None:
    """Does what a button of the list or of the open evaluation says; nothing for a folder that is not listed."""
    if job not in evaluation.evaluations(settings):
        return
    if what == "open":
        seen.opened, seen.shown = job.name, seen.shown + 1
    elif what == "delete":
        start_stop.delete(settings, job)
    elif what == "stop":
        start_stop.stop(settings, job)
