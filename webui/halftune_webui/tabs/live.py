"""The part of a page that the server writes as HTML, and the scripts of the page."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.calls import event_values
from halftune_webui.context import Context


def script(name: str, **constants: Any) -> str:
    """The text of ``assets/<name>.js`` with its :func:`filled_in` constants."""
    text = files("halftune_webui").joinpath("assets", f"{name}.js").read_text(encoding="utf-8")
    return filled_in(text, **constants)


def filled_in(text: str, **constants: Any) -> str:
    """A script in which the value of each constant stands for its name, as JSON.

    Gradio may run a component's script before it has given the component its properties; only ``value`` and what
    changes while the page is open may come that way.

    Args:
        text: the script; a constant's name is a word of it in capitals.
        constants: by name; all are put in at once, so that a value may contain another one's name.

    Raises:
        KeyError: the script has no such word.
    """
    values = {name: json.dumps(value).replace("<", "\\u003c") for name, value in constants.items()}
    for name in values:
        if not re.search(rf"\b{name}\b", text):
            raise KeyError(name)
    return re.sub("|".join(rf"\b{name}\b" for name in values), lambda found: values[found[0]], text) if values else text


def live(elem_id: str, value: str = "") -> gr.HTML:
    """An area of HTML that keeps scrolling and folding when it is written anew; ``submit`` tells of its buttons."""
    return gr.HTML(value, html_template='<div class="ht-live"></div>', js_on_load=script("live"), elem_id=elem_id)


def only_while_shown(context: Context, clock: gr.Timer, tab: str) -> None:
    """Lets a timer tick only while the tab that is being built is open: a page that shows another one asks for nothing.

    Args:
        context: of the tab.
        clock: the timer, made inactive.
        tab: name of the tab.
    """
    label = context.words(f"tabs.{tab}")
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

    def switched(event: gr.EventData) -> gr.Timer:
        (opened,) = event_values(event, value=str)
        return gr.Timer(active=opened == label)

    # the tab reports being opened by a click or by a program; the row of tabs reports clicks only
    here = Blocks.block
    assert isinstance(here, gr.Tab)
    here.select(lambda: gr.Timer(active=True), None, clock, queue=False, **quiet)
    context.tabs.select(switched, None, clock, queue=False, **quiet)
