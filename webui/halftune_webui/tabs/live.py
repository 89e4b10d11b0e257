"""The part of a page that the server writes as HTML, and the scripts of the page."""

from __future__ import annotations

from importlib.resources import files

import gradio as gr


def script(name: str) -> str:
    """The text of ``assets/<name>.js``."""
    return files("halftune_webui").joinpath("assets", f"{name}.js").read_text(encoding="utf-8")


def live(elem_id: str, value: str = "") -> gr.HTML:
    """An area of HTML that keeps scrolling and folding when it is written anew; ``submit`` tells of its buttons."""
    return gr.HTML(value, html_template='<div class="ht-live"></div>', js_on_load=script("live"), elem_id=elem_id)
