"""The Machine tab: what plans know of this machine, and which optional packages are there."""

from __future__ import annotations

import gradio as gr
from gradio.context import Context as Blocks

from halftune.hardware.probe import probe
from halftune_webui.context import Context
from halftune_webui.machine_panel import machine_view
from halftune_webui.tabs.runs import live


def build(context: Context) -> None:
    """Facts and packages, looked up when the page is opened and when the button is pressed."""
    words = context.words
    shown = live("machine-facts")
    with gr.Row(elem_classes="ht-row"):
        button = gr.Button(words("machine.again"), elem_id="machine-again")

    def look() -> str:
        return machine_view(probe(), words)

    board = Blocks.root_block
    assert board is not None
    for event in (board.load, button.click):
        event(look, None, shown, show_progress="hidden", api_visibility="private")
