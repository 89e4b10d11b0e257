"""Shared objects of all tabs."""

from __future__ import annotations

import json
from dataclasses import dataclass

import gradio as gr

from halftune_webui.labels import Words
from halftune_webui.runs.listing import Listing
from halftune_webui.settings import Settings


@dataclass(frozen=True)
class Context:
    """Handed to ``build(context)`` of every tab, inside the Blocks.

    Attributes:
        settings: roots, runs folder, language.
        words: the labels.
        blocks: the page; ``blocks.load(…)`` runs when a browser opens it.
        tabs: the row of tabs; ``gr.Tabs(selected="runs")`` returned to it opens the tab of that name.
        recipe: the YAML text of the Train tab; use it as an event input.
        start: the button under the recipe; the Train tab shows it, the Runs tab gives it its work. Before anything is
            started or read, ``recipe.examine(text, settings)`` says whether the recipe may be.
        address: with ``js=kept(name)`` in an event: what the page's address keeps under that name.
        listing: the runs, as every tab sees them; what it remembers is read once for all.
        choosers: each tab's list of runs with a result, see ``tabs/choose.py``.
    """

    settings: Settings
    words: Words
    blocks: gr.Blocks
    tabs: gr.Tabs
    recipe: gr.Code
    start: gr.Button
    address: gr.Textbox
    listing: Listing
    choosers: dict[str, gr.Dropdown]


def kept(name: str, before: int = 0) -> str:
    """JavaScript for an event: what the address keeps under ``name``, one a line, after the values of other inputs.

    Args:
        name: see ``assets/page.js``.
        before: inputs that come before :attr:`Context.address`.
    """
    found = f"new URLSearchParams(location.hash.slice(1)).getAll({json.dumps(name)}).join('\\n')"
    return f"(...values) => [...values.slice(0, {before}), {found}]"
