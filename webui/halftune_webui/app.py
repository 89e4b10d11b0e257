"""The whole web UI: header, tabs, theme."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes import Base, Color, colors, sizes

from halftune.core.table import load
from halftune_webui.calls import WebUI
from halftune_webui.context import Context
from halftune_webui.labels import load_words
from halftune_webui.runs.listing import Listing
from halftune_webui.settings import Settings
from halftune_webui.tabs import TABS
from halftune_webui.tabs.choose import choosers
from halftune_webui.tabs.live import script as asset

STYLES = [
    Path(str(files("halftune.train.report").joinpath("charts.css"))),
    *(Path(str(files("halftune_webui").joinpath("assets", f"{name}.css"))) for name in ("page", "runs", "workbench")),
]
# Fonts of the reader's system: the page asks no other server for anything.
SANS = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "Noto Sans CJK SC", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace"]


def build(settings: Settings, *, sign_out: bool = False) -> gr.Blocks:
    """The page for these settings; nothing is started or listened on.

    Args:
        settings: limits of the web UI.
        sign_out: whether there is a password, and so a link that ends the visit.
    """
    words = load_words(settings.language)
    with WebUI(title=words("page.title"), analytics_enabled=False, fill_width=True) as blocks:
        head = f"<h1>{escape(words('page.title'))}</h1><span>{escape(words('page.tagline'))}</span>"
        if sign_out:
            head += f'<a href="logout">{escape(words("page.sign_out"))}</a>'
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
        address = gr.Textbox(visible=False)
        with gr.Tabs(elem_id="tabs") as tabs:
            listing = Listing(settings.runs)
            context = Context(settings, words, blocks, tabs, recipe, start, address, listing, choosers(words))
            for name in TABS:
                with gr.Tab(title := words(f"tabs.{name}"), id=name, elem_id=f"tab-{name}"):
                    gr.HTML(f'<h2 class="ht-hidden">{escape(title)}</h2>', js_on_load=None)
                    load(TABS, name, kind="tab")(context)
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
        blocks.load(
            lambda name: gr.Tabs(selected=name) if name in TABS else gr.skip(),
            address,
            tabs,
            js=asset("hidden_tab"),
            **quiet,
        )
    for function in blocks.fns.values():
        function.api_visibility = "private"  # the web UI is for people; programs have the command line
    return blocks


def script(language: str) -> str:
    """What the page runs once it is there."""
    text = asset("page", LANGUAGE=language)
    return text[text.index("() =>") :]


# The accent of assets/page.css in every strength that Gradio asks for.
_SHADES = ("f1f7f6", "dcebe9", "bcd9d6", "93c2bd", "6cc0b8", "4a938d", "397d78", "2f6f6b", "265a57", "1f4946", "143230")
ACCENT = Color(*(f"#{shade}" for shade in _SHADES), name="halftune")


# Nothing on the page is smaller than 13 pixels.
TEXT = sizes.Size(name="halftune", xxs="13px", xs="13px", sm="13px", md="14px", lg="16px", xl="22px", xxl="26px")


def theme() -> Base:
    """A quiet theme without downloaded fonts."""
    return Base(
        primary_hue=ACCENT,
        neutral_hue=colors.gray,
        spacing_size=sizes.spacing_sm,
        text_size=TEXT,
        font=SANS,
        font_mono=MONO,
    ).set(
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
        button_primary_text_color="white",
        block_label_text_size="*text_sm",
        body_text_color_subdued="*neutral_600",  # readable on white and on every tint
        body_text_color_subdued_dark="*neutral_300",
        color_accent="*primary_700",  # of the chosen tab, ticks and sliders
        slider_color="*primary_700",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_700",
        checkbox_background_color_selected_dark="*primary_600",
        checkbox_border_color_selected="*primary_700",
        checkbox_border_color_selected_dark="*primary_600",
    )
