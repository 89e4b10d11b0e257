"""A list of the runs that have a result, read again whenever it is opened."""

from __future__ import annotations

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.context import Context
from halftune_webui.labels import Words
from halftune_webui.runs import queue
from halftune_webui.runs.export import finished
from halftune_webui.runs.show import name_of
from halftune_webui.runs.state import RunState
from halftune_webui.settings import Settings

CHOOSERS = {"chat": "chat-run", "export": "export-run"}
"""Tab → its list: a run's card chooses the run there. They are made before the tabs, and shown by :func:`chooser`."""


def choosers(words: Words) -> dict[str, gr.Dropdown]:
    """The lists by their ``elem_id``, not shown yet."""
    return {
        name: gr.Dropdown(
            [], value=None, label=words("choose.run"), info=words("choose.help"), elem_id=name, render=False
        )
        for name in CHOOSERS.values()
    }


def chosen(run: str | None, states: list[RunState], settings: Settings, words: Words) -> gr.Dropdown:
    """A list of these runs in which one is chosen, the first one where it is not there."""
    found = [(name_of(one, settings.runs), str(one)) for one in finished(states)]
    known = [path for _, path in found]
    info = words("choose.help" if found else "choose.none")
    return gr.Dropdown(found, value=run if run in known else (known[0] if known else None), info=info)


def chooser(context: Context, elem_id: str) -> gr.Dropdown:
    """The dropdown; its value is the path of a run folder."""
    settings, box = context.settings, context.choosers[elem_id]

    def again(run: str | None) -> gr.Dropdown:
        return chosen(run, context.listing.look(queue.waiting(settings.runs)), settings, context.words)

    box.render()
    tab = Blocks.block
    while not isinstance(tab, gr.Tab):
        assert tab is not None
        tab = tab.parent
    tab.select(again, box, box, show_progress="hidden", api_visibility="private", queue=False)
    return box
