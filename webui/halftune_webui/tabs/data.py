"""The Data tab: what the recipe of the Train tab would be trained on, before any training."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.config.tree import child
from halftune.core.errors import ConfigError, HalftuneError, Problems
from halftune_webui.calls import event_values
from halftune_webui.context import Context, kept
from halftune_webui.html import render, small_codes
from halftune_webui.labels import Words
from halftune_webui.recipes.recipe import examine, paths_of
from halftune_webui.recipes.yaml_edit import read
from halftune_webui.runs.ask import Asks, Stopped, recipe_file
from halftune_webui.runs.view.samples import data_view
from halftune_webui.tabs.live import live

_FETCHED = 100  # samples of one look, whose pages can be turned without another one
_REMEMBERED = 8  # reports
_MENDED_BY_COLUMNS = ("data.unknown_format", "data.bad_columns")
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


@dataclass
class Report:
    """An answer that pages can be turned in, and that a page finds again after a reload."""

    answer: dict[str, Any]
    recipe: str
    size: int
    start: int = 0

    def view(self, key: str, words: Words) -> str:
        """As it is shown."""
        return data_view(self.answer, words, self.start, self.size, key, self.recipe)


@dataclass
class Reports:
    """The latest reports, by keys that nobody guesses."""

    of: dict[str, Report] = field(default_factory=dict)

    def add(self, report: Report) -> str:
        """Its key; the oldest report is let go of."""
        while len(self.of) >= _REMEMBERED:
            self.of.pop(next(iter(self.of)))
        key = secrets.token_urlsafe(9)
        self.of[key] = report
        return key


def build(context: Context) -> None:
    """What will be looked at, the buttons, the report."""
    words = context.words
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("data.what"))}</p></div>', js_on_load=None)
    subject = live("data-subject")
    with gr.Row(elem_id="look", elem_classes="ht-row"):
        count = gr.Slider(1, 20, value=5, step=1, label=words("data.how_many"), elem_id="sample-count")
        text = gr.Textbox(label=words("data.find"), info=words("data.find_help"), elem_id="data-find")
    with gr.Row(elem_id="look-buttons", elem_classes="ht-row"):
        button = gr.Button(words("data.look"), variant="primary", elem_id="look-at-data")
        drawn = gr.Button(words("data.random"), elem_id="look-at-random")
        stop = gr.Button(words("data.stop"), elem_id="data-stop", interactive=False)
    report = live("data-report")
    _wire(context, subject, [context.recipe, count, text], (button, drawn, stop), report)


def _wire(
    context: Context, subject: gr.HTML, inputs: list[Any], buttons: tuple[gr.Button, gr.Button, gr.Button], report: Any
) -> None:
    words, asks, reports = context.words, Asks(), Reports()
    look, drawn, stop = buttons
    blocks = Blocks.root_block
    assert blocks is not None

    def looked(page: str, text: str, number: float, find: str | None, *options: str) -> Iterator[list[Any]]:
        can_stop, over = gr.Button(interactive=True), gr.Button(interactive=False)
        yield [waiting(words("data.reading")), can_stop]
        asked = ("--samples", str(_FETCHED), f"--find={find or ''}", *options)

        def show(answer: dict[str, Any]) -> str:
            report = Report(answer, text, int(number))
            return report.view(reports.add(report), words)

        yield [answered(context, asks, page, "data", text or "", *asked, show=show), over]

    def first(text: str, number: float, find: str | None, request: gr.Request) -> Iterator[list[Any]]:
        yield from looked(str(request.session_hash), text, number, find)

    def at_random(text: str, number: float, find: str | None, request: gr.Request) -> Iterator[list[Any]]:
        seed = str(secrets.randbelow(10**6))
        yield from looked(str(request.session_hash), text, number, find, "--shuffle", seed)

    def turned(event: gr.EventData) -> Any:
        act, key = event_values(event, act=str, run=str)
        found = reports.of.get(key)
        if found is None:
            return failed(words("data.gone"))
        step = {"next": found.size, "previous": -found.size}.get(act, 0)
        found.start = min(max(0, found.start + step), max(0, len(found.answer["samples"]) - 1))
        return found.view(key, words)

    def restored(key: str) -> Any:
        found = reports.of.get(key)
        return gr.skip() if found is None else found.view(key, words)

    def stopped(request: gr.Request) -> None:
        asks.stop(str(request.session_hash))

    look.click(first, inputs, [report, stop], **_QUIET)
    inputs[-1].submit(first, inputs, [report, stop], **_QUIET)
    drawn.click(at_random, inputs, [report, stop], **_QUIET)
    stop.click(stopped, None, None, queue=False, api_visibility="private")
    report.submit(turned, None, report, queue=False, **_QUIET)
    # assets/page.js marks a report of another recipe
    remember = "(text) => { window.halftuneRecipe = text; return [text]; }"
    context.recipe.change(
        lambda text: subject_of(text or "", words),
        context.recipe,
        subject,
        js=remember,
        trigger_mode="always_last",
        queue=False,
        **_QUIET,
    )
    blocks.load(restored, context.address, report, js=kept("data"), queue=False, **_QUIET)
    blocks.unload(stopped)


def answered(
    context: Context,
    asks: Asks,
    page: str,
    verb: str,
    text: str | None,
    *options: str,
    show: Callable[[dict[str, Any]], str],
    good: Sequence[int] = (0,),
) -> str:
    """What ``show`` makes of a verb's answer, or why there is none, as HTML.

    Args:
        context: of the tab.
        asks: the processes of the tab.
        page: who asks.
        verb: the verb.
        text: the recipe that the verb looks at; None for none.
        options: of the verb.
        show: makes HTML of the answer.
        good: exit codes that come with an answer.
    """
    words, settings = context.words, context.settings
    try:
        if text is None:
            return show(asks.ask(page, verb, *options, good=good))
        examined = examine(text, settings)
        if examined.problems:
            raise Problems(examined.problems)
        with recipe_file(settings.runs, examined.runnable) as file:
            return show(asks.ask(page, verb, *options, good=good, recipe=file))
    except Stopped:
        return f'<p class="help">{escape(words("data.stopped"))}</p>'
    except HalftuneError as error:
        mapped = any(problem.code in _MENDED_BY_COLUMNS for problem in error.problems)
        where = f'<p class="help">{escape(words("data.mend_columns"))}</p>' if mapped else ""
        return failed("\n".join(map(words.problem, error.problems))) + where


def subject_of(text: str, words: Words) -> str:
    """Which recipe and which files will be looked at."""
    try:
        values = read(text).values
    except ConfigError:
        return failed(words("data.unreadable"))
    sources = [path for key, path in paths_of(values) if key[:2] in (("data", "train"), ("data", "eval"))]
    run = child(child(values, "training"), "output_dir")
    facts = (("data.recipe", str(run or "")), ("data.files", ", ".join(dict.fromkeys(sources))))
    return render("facts", facts=facts, words=words)


def waiting(text: str) -> str:
    """That something is being done."""
    return f'<p class="help" role="status">{escape(text)}</p><div class="progress unknown"><i></i></div>'


def failed(text: str) -> str:
    """That something failed, in words."""
    return f'<p class="cause" role="alert">{small_codes(text)}</p>'
