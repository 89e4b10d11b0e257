"""The whole board: header, tabs, theme."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

import gradio as gr
from gradio.themes import Base, Color, colors, sizes

from halftune.core.table import load
from halftune_webui.calls import Board
from halftune_webui.context import Context
from halftune_webui.labels import load_words
from halftune_webui.runs.listing import Listing
from halftune_webui.settings import Settings
from halftune_webui.tabs import TABS
from halftune_webui.tabs.choose import choosers

STYLES = [
    Path(str(files("halftune_webui").joinpath("assets", f"{name}.css"))) for name in ("board", "runs", "workbench")
]
# Fonts of the reader's system: the page asks no other server for anything.
SANS = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "Noto Sans CJK SC", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace"]


def build(settings: Settings) -> gr.Blocks:
    """The page for these settings; nothing is started or listened on."""
    words = load_words(settings.language)
    with Board(title=words("board.title"), analytics_enabled=False, fill_width=True) as board:
        head = f"<b>{escape(words('board.title'))}</b><span>{escape(words('board.tagline'))}</span>"
        gr.HTML(f'<header class="ht-head">{head}</header>', js_on_load=None)
        recipe = gr.Code(
            language="yaml",
            render=False,
            elem_id="recipe",
            label=words("train.recipe"),
            interactive=True,
            lines=12,
            max_lines=32,
            buttons=["copy"],
            wrap_lines=True,
        )
        start = gr.Button(words("train.start"), variant="primary", render=False, elem_id="start")
        with gr.Tabs(elem_id="tabs") as tabs:
            listing = Listing(settings.runs)
            context = Context(settings, words, board, tabs, recipe, start, listing, choosers(words))
            for name in TABS:
                with gr.Tab(words(f"tabs.{name}"), id=name, elem_id=f"tab-{name}"):
                    load(TABS, name, kind="tab")(context)
    for function in board.fns.values():
        function.api_visibility = "private"  # the board is for people; programs have the command line
    return board


# The accent of assets/board.css in every strength that Gradio asks for.
_SHADES = ("f1f7f6", "dcebe9", "bcd9d6", "93c2bd", "6cc0b8", "4a938d", "397d78", "2f6f6b", "265a57", "1f4946", "143230")
ACCENT = Color(*(f"#{shade}" for shade in _SHADES), name="halftune")


def theme() -> Base:
    """A quiet theme without downloaded fonts."""
    return Base(
        primary_hue=ACCENT,
        neutral_hue=colors.gray,
        spacing_size=sizes.spacing_sm,
        text_size=sizes.text_md,
        font=SANS,
        font_mono=MONO,
    ).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
        block_label_text_size="*text_sm",
        body_text_color_subdued="*neutral_500",  # readable on white
        color_accent="*primary_700",  # of the chosen tab, ticks and sliders
        slider_color="*primary_700",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_700",
        checkbox_background_color_selected_dark="*primary_600",
        checkbox_border_color_selected="*primary_700",
        checkbox_border_color_selected_dark="*primary_600",
    )
