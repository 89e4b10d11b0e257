"""A list of the runs that have a result, read again whenever it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.context import Context, kept
from halftune_webui.labels import Words
from halftune_webui.runs.export import finished
from halftune_webui.runs.state import RunState
from halftune_webui.runs.view.show import name_of
from halftune_webui.runs.waiting import waiting
from halftune_webui.settings import Settings

CHOOSERS = {"chat": "chat-run", "export": "export-run"}
"""Tab → its list: a run's card chooses the run there. They are made before the tabs, and shown by :func:`chooser`."""


def choosers(words: Words) -> dict[str, gr.Dropdown]:
    """The lists by their tab, not shown yet."""
    return {
        tab: gr.Dropdown(
            [], value=None, label=words("choose.run"), info=words("choose.help"), elem_id=name, render=False
        )
        for tab, name in CHOOSERS.items()
    }


def chosen(wanted: Iterable[str | None], states: list[RunState], settings: Settings, words: Words) -> gr.Dropdown:
    """A list of these runs in which one is chosen: the first one of ``wanted`` that is there, else the newest."""
    found = [(name_of(one, settings.runs), str(one)) for one in finished(states)]
    known = [path for _, path in found]
    info = words("choose.help" if found else "choose.none")
    return gr.Dropdown(found, value=next((one for one in (*wanted, *known) if one in known), None), info=info)


def chooser(context: Context, tab: str) -> gr.Dropdown:
    """The dropdown of a tab, shown here; its value is the path of a run folder, first the one of the page's address."""
    settings, box = context.settings, context.choosers[tab]

    def again(run: str | None, asked: str) -> gr.Dropdown:
        return chosen((run, asked), context.listing.look(waiting(settings.runs)), settings, context.words)

    box.render()
    here = Blocks.block
    while not isinstance(here, gr.Tab):
        assert here is not None
        here = here.parent
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
    here.select(again, [box, context.address], box, js=kept(tab, 1), **quiet)
    return box
