"""What a call answers, without a server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

gr = pytest.importorskip("gradio", reason="the web UI's package is not installed")

from gradio.state_holder import SessionState  # noqa: E402

from halftune_webui.calls import WebUI  # noqa: E402


def test_only_outputs_that_change_are_built_anew() -> None:
    with WebUI() as web_ui:
        outputs = [gr.HTML("a"), gr.HTML("b"), gr.Textbox("c")]
        gr.Button().click(lambda: None, None, outputs)
    (function,) = web_ui.fns.values()

    def answer(*values: object) -> tuple[list[object], list[int]]:
        state = SessionState(web_ui)
        with ThreadPoolExecutor(1) as pool:  # a browser test may have left a loop in this thread
            sent = pool.submit(asyncio.run, web_ui.postprocess_data(function, list(values), state)).result()
        return sent, [place for place, one in enumerate(outputs) if state[one._id] is not one]

    skip = {"__type__": "update"}
    assert answer(gr.skip(), gr.skip(), gr.skip()) == ([skip] * 3, [])
    assert answer(gr.skip(), "x", gr.skip()) == ([skip, "x", skip], [])
    assert answer("x", gr.skip(), None) == (["x", skip, None], [])
    sent, anew = answer(gr.skip(), gr.skip(), gr.Textbox(value="y", visible=False))
    assert (sent[:2], anew) == ([skip] * 2, [2])
    assert sent[2] == {"value": "y", "visible": False, **skip}
    with pytest.raises(ValueError, match="enough output"):
        answer("x")
