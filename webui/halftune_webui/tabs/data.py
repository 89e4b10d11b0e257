"""The Data tab: what the recipe of the Train tab would be trained on, before any training."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import gradio as gr

from halftune.core.errors import HalftuneError
from halftune_webui.context import Context
from halftune_webui.recipe import examine
from halftune_webui.runs.ask import ask, recipe_file
from halftune_webui.runs.samples import data_view
from halftune_webui.tabs.runs import live


def build(context: Context) -> None:
    """A button, the number of samples, the report."""
    words, settings = context.words, context.settings
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("data.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="look", elem_classes="ht-row"):
        count = gr.Slider(1, 20, value=5, step=1, label=words("data.how_many"), elem_id="sample-count")
        button = gr.Button(words("data.look"), variant="primary", elem_id="look-at-data")
    report = live("data-report")

    def look(text: str, number: float) -> Iterator[str]:
        examined = examine(text or "", settings)
        if examined.problems:
            yield failed("\n".join(map(words.problem, examined.problems)))
            return
        yield waiting(words("data.reading"))
        try:
            with recipe_file(settings.runs, examined.runnable) as file:
                answer = ask("data", "--samples", str(int(number)), recipe=file)
        except HalftuneError as error:
            where = f'<p class="help">{escape(words("data.mend_columns"))}</p>' if "columns:" in str(error) else ""
            yield failed(str(error)) + where
        else:
            yield data_view(answer, words)

    button.click(look, [context.recipe, count], report, show_progress="hidden", api_visibility="private")


def waiting(text: str) -> str:
    """That something is being done."""
    return f'<p class="help">{escape(text)}</p><div class="progress unknown"><i></i></div>'


def failed(text: str) -> str:
    """That something failed, in words."""
    return f'<p class="cause" role="alert">{escape(text)}</p>'
