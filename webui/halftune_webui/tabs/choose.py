"""A list of the runs that have a result, read again whenever it is opened."""

from __future__ import annotations

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.context import Context, kept
from halftune_webui.runs import queue
from halftune_webui.runs.export import finished
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.show import name_of


def chooser(context: Context, listing: Listing, name: str, elem_id: str) -> gr.Dropdown:
    """The dropdown; its value is the path of a run folder: the one that the page's address keeps under ``name``."""
    runs = context.settings.runs

    def choices() -> list[tuple[str, str]]:
        found = finished(listing.look(queue.waiting(runs)))
        return [(name_of(run, runs), str(run)) for run in found]

    def again(chosen: str | None, asked: str) -> gr.Dropdown:
        found = choices()
        known = [path for _, path in found]
        value = next((path for path in (chosen, asked, *known) if path in known), None)
        info = context.words("choose.help" if found else "choose.none")
        return gr.Dropdown(found, value=value, info=info)

    box = gr.Dropdown(
        [], value=None, label=context.words("choose.run"), info=context.words("choose.help"), elem_id=elem_id
    )
    board = Blocks.root_block
    assert board is not None
    for event in (board.load, context.tabs.change):
        event(
            again,
            [box, context.address],
            box,
            js=kept(name, 1),
            show_progress="hidden",
            api_visibility="private",
        )
    return box
