"""What every tab is built with."""

from __future__ import annotations

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
        board: the page; ``board.load(…)`` runs when a browser opens it.
        tabs: the row of tabs; ``gr.Tabs(selected="runs")`` returned to it opens the tab of that name.
        recipe: the YAML text of the Train tab; an input for whoever needs the recipe as it stands.
        start: the button under the recipe; the Train tab shows it, the Runs tab gives it its work. Before anything is
            started or read, ``recipe.examine(text, settings)`` says whether the recipe may be.
        listing: the runs, as every tab sees them; what it remembers is read once for all.
        choosers: lists of runs with a result by their ``elem_id``, see ``tabs/choose.py``.
    """

    settings: Settings
    words: Words
    board: gr.Blocks
    tabs: gr.Tabs
    recipe: gr.Code
    start: gr.Button
    listing: Listing
    choosers: dict[str, gr.Dropdown]
