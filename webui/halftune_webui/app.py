"""The whole board: header, tabs, theme."""

from __future__ import annotations

import gradio as gr

from halftune.core.table import load
from halftune_webui.context import Context
from halftune_webui.labels import load_words
from halftune_webui.settings import Settings
from halftune_webui.tabs import TABS


def build(settings: Settings) -> gr.Blocks:
    """The page for these settings; nothing is started or listened on."""
    words = load_words(settings.language)
    with gr.Blocks(title=words("board.title"), analytics_enabled=False, fill_width=True) as board:
        recipe = gr.Code(language="yaml", render=False, elem_id="recipe", label=words("train.recipe"))
        start = gr.Button(words("train.start"), variant="primary", render=False, elem_id="start")
        with gr.Tabs(elem_id="tabs") as tabs:
            context = Context(settings, words, tabs, recipe, start)
            for name in TABS:
                with gr.Tab(words(f"tabs.{name}"), id=name, elem_id=f"tab-{name}"):
                    load(TABS, name, kind="tab")(context)
    return board
