"""A list of the runs that have a result, read again whenever it is opened."""

from __future__ import annotations

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.context import Context
from halftune_webui.runs import queue
from halftune_webui.runs.export import finished
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.show import name_of


def chooser(context: Context, listing: Listing, elem_id: str) -> gr.Dropdown:
    """The dropdown; its value is the path of a run folder."""
    runs = context.settings.runs

    def choices() -> list[tuple[str, str]]:
        found = finished(listing.look(queue.waiting(runs)))
        return [(name_of(run, runs), str(run)) for run in found]

    def again(chosen: str | None) -> gr.Dropdown:
        found = choices()
        known = [path for _, path in found]
        info = context.words("choose.help" if found else "choose.none")
        return gr.Dropdown(found, value=chosen if chosen in known else (known[0] if known else None), info=info)

    box = gr.Dropdown(
        [], value=None, label=context.words("choose.run"), info=context.words("choose.help"), elem_id=elem_id
    )
    board = Blocks.root_block
    assert board is not None
    board.load(again, box, box, show_progress="hidden", api_visibility="private")
    context.tabs.change(again, box, box, show_progress="hidden", api_visibility="private")
    return box
