"""A list of the runs that have a result, read again whenever it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune_webui.context import Context, kept
from halftune_webui.labels import Words
from halftune_webui.runs.results.export import finished
from halftune_webui.runs.state import RunState
from halftune_webui.runs.view.show import name_of
from halftune_webui.runs.waiting import waiting
from halftune_webui.settings import Settings

CHOOSERS = {"chat": "chat-run", "evaluate": "evaluate-run", "export": "export-run"}
"""Tab → its list: a run's card chooses the run there. They are made before the tabs, and shown by :func:`chooser`."""
SEVERAL = ("evaluate",)  # tabs whose list may have several chosen ones


def choosers(words: Words) -> dict[str, gr.Dropdown]:
    """The lists by their tab, not shown yet."""
    return {
        tab: gr.Dropdown(
            [],
            value=None,
            multiselect=tab in SEVERAL,
            label=words("choose.runs" if tab in SEVERAL else "choose.run"),
            info=words("choose.help"),
            elem_id=name,
            render=False,
        )
        for tab, name in CHOOSERS.items()
    }


def chosen(
    wanted: Iterable[str | None], states: list[RunState], settings: Settings, words: Words, tab: str = ""
) -> gr.Dropdown:
    """A list of these runs in which one is chosen: the first one of ``wanted`` that is there, else the newest.

    In the list of a tab of ``SEVERAL``, every wanted one that is there is chosen.
    """
    found = [(name_of(one, settings.runs), str(one)) for one in finished(states)]
    known = [path for _, path in found]
    info = words("choose.help" if found else "choose.none")
    there = [one for one in dict.fromkeys(wanted) if one in known] or known[:1]
    return gr.Dropdown(found, value=there if tab in SEVERAL else next(iter(there), None), info=info)


def chooser(context: Context, tab: str) -> gr.Dropdown:
    """The dropdown of a tab, shown here; its value is the path of a run folder, first the one of the page's address.

    The value is a list of paths where several may be chosen.
    """
    settings, box = context.settings, context.choosers[tab]

    def again(now: str | list[str] | None, asked: str) -> gr.Dropdown:
        wanted = now if isinstance(now, list) else [now]
        return chosen([*wanted, asked], context.listing.look(waiting(settings.runs)), settings, context.words, tab)

    box.render()
    here = Blocks.block
    while not isinstance(here, gr.Tab):
        assert here is not None
        here = here.parent
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
    here.select(again, [box, context.address], box, js=kept(tab, 1), **quiet)
    return box
