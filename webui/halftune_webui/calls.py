"""Calls that no page of this board makes: refused, and the terminal gets one line of them, not a traceback."""

from __future__ import annotations

from typing import Any

import gradio as gr

from halftune.core.log import get_logger

log = get_logger(__name__)
_LONGEST = 200  # characters of what is repeated of a call
_TEXTS = (gr.Code, gr.Textbox)  # Gradio hands on whatever is sent for these


class Board(gr.Blocks):
    """Gradio's page, which looks at what it is sent before the board's own functions do."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], state: Any, explicit_call: bool = False) -> Any:
        """The values of a call, one for each input.

        Raises:
            gr.Error: the page cannot have sent this.
        """
        if block_fn.fn is None:
            raise refused("a function that runs in the browser")
        try:
            values = await super().preprocess_data(block_fn, inputs, state, explicit_call)
        except (gr.Error, ValueError, TypeError, AttributeError) as error:
            raise refused(error.message if isinstance(error, gr.Error) else str(error)) from None
        for block, value in zip(block_fn.inputs, values, strict=False):  # what is asked of the request comes after them
            if isinstance(block, _TEXTS) and not isinstance(value, str | None):
                raise refused(f"{value!r} for a text")
        return values


def told(event: gr.EventData, **kinds: type) -> list[Any]:
    """What the page's own script tells with an event, by name.

    Raises:
        gr.Error: something is not there, or of another kind.
    """
    try:
        values = [getattr(event, name) for name in kinds]
    except (AttributeError, TypeError):  # nothing was told at all
        raise refused(f"an event without {', '.join(kinds)}") from None
    if not all(map(isinstance, values, kinds.values())):
        raise refused(f"an event with {values!r}")
    return values


def refused(what: str) -> gr.Error:
    """The error for such a call, which has been told to the terminal."""
    short = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}…"
    log.warning("refused a call that this page does not make: %s", short.replace("\n", " "))
    return gr.Error(short, print_exception=False)
