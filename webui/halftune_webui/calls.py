"""Calls of the page: what it cannot send is refused in one line, without a traceback; skipped outputs cost nothing."""

from __future__ import annotations

from copy import copy
from typing import Any

import gradio as gr

from halftune.core.log import get_logger

log = get_logger(__name__)
_LONGEST = 200  # characters of what is repeated of a call
_TEXTS = (gr.Code, gr.Textbox)  # Gradio hands on whatever is sent for these


class WebUI(gr.Blocks):
    """Gradio's page; checks what it is sent before the functions of the web UI see it."""

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

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """The answer to a call, one value for each output.

        Gradio builds the component of a skipped output anew and renders its config twice. An open page skips
        almost everything every two seconds, and that was two fifths of what it cost.
        """
        outputs, skip = block_fn.outputs, gr.skip()
        if len(outputs) < 2 or not isinstance(predictions, list) or len(predictions) != len(outputs):
            return await super().postprocess_data(block_fn, predictions, state)
        changed = [place for place, value in enumerate(predictions) if not isinstance(value, dict) or value != skip]
        if not changed:
            return [skip] * len(outputs)
        rest, values = copy(block_fn), list(map(predictions.__getitem__, changed))
        rest.outputs = list(map(outputs.__getitem__, changed))
        # Gradio takes the bare value where there is one output
        sent = await super().postprocess_data(rest, values if len(values) > 1 else values[0], state)
        answer = dict(zip(changed, sent, strict=True))
        return [answer.get(place, skip) for place in range(len(outputs))]


def event_values(event: gr.EventData, **kinds: type) -> list[Any]:
    """What the page's own script tells with an event, by name.

    Raises:
        gr.Error: something is not there, or of another kind.
    """
    try:
        values = [getattr(event, name) for name in kinds]
    except (AttributeError, TypeError):  # the event has no data
        raise refused(f"an event without {', '.join(kinds)}") from None
    if not all(map(isinstance, values, kinds.values())):
        raise refused(f"an event with {values!r}")
    return values


def refused(what: str) -> gr.Error:
    """The error for such a call, which is written to the terminal."""
    short = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}…"
    log.warning("refused a call that this page does not make: %s", short.replace("\n", " "))
    return gr.Error(short, print_exception=False)
