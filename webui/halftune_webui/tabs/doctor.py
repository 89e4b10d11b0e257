"""The Doctor tab: this machine, and ``halftune doctor`` on the environment and on the recipe of the Train tab."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.probe import probe
from halftune_webui.context import Context
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.plans.machine_panel import OPTIONAL, free_of, machine_view
from halftune_webui.plans.planning import HERE
from halftune_webui.runs.ask import Asks
from halftune_webui.tabs.data import answered, waiting
from halftune_webui.tabs.live import live

_ANSWERS = (0, 1, 2, 3)  # 1: something is not well; 2, 3: the recipe or the model is wrong, said in the answer


def build(context: Context) -> None:
    """What to look at, what was found, and below it the machine as plans know it."""
    words = context.words
    gr.HTML(f'<div class="ht-live"><p class="help">{escape(words("doctor.what"))}</p></div>', js_on_load=None)
    with gr.Row(elem_id="examine", elem_classes="ht-row"):
        recipe = gr.Checkbox(value=True, label=words("doctor.recipe"), elem_id="doctor-recipe")
        machine = gr.Dropdown(
            [(words("doctor.usual"), HERE), *((lookup(name, {}).devices[0].name, name) for name in CATALOGUE)],
            value=HERE,
            label=words("doctor.machine"),
            elem_id="doctor-machine",
        )
        kernels = gr.Checkbox(label=words("doctor.kernels"), elem_id="doctor-kernels")
    with gr.Row(elem_id="examine-buttons", elem_classes="ht-row"):
        button = gr.Button(words("doctor.start"), variant="primary", elem_id="doctor-start")
        stop = gr.Button(words("data.stop"), elem_id="doctor-stop", interactive=False)
        again = gr.Button(words("machine.again"), elem_id="machine-again")
    found, facts = live("doctor-found"), live("machine-facts")
    asks, quiet = Asks(), dict[str, Any](show_progress="hidden", api_visibility="private")
    blocks = Blocks.root_block
    assert blocks is not None

    def look(text: str, with_recipe: bool, name: str, with_kernels: bool, request: gr.Request) -> Iterator[list[Any]]:
        options = ["--kernels"] if with_kernels else []
        options += ["--hardware", name] if name in CATALOGUE else []
        yield [waiting(words("doctor.looking")), gr.Button(interactive=True)]
        recipe, page = (text or "") if with_recipe else None, str(request.session_hash)
        shown = answered(context, asks, page, "doctor", recipe, *options, show=view, good=_ANSWERS)
        yield [shown, gr.Button(interactive=False)]

    def view(answer: dict[str, Any]) -> str:
        return doctor_view(answer, words)

    def stopped(request: gr.Request) -> None:
        asks.stop(str(request.session_hash))

    button.click(look, [context.recipe, recipe, machine, kernels], [found, stop], **quiet)
    stop.click(stopped, None, None, queue=False, api_visibility="private")
    for event in (blocks.load, again.click):
        event(lambda: machine_view(probe(), free_of(context.settings.runs), words), None, facts, **quiet)
    blocks.unload(stopped)


def doctor_view(answer: dict[str, Any], words: Words) -> str:
    """The answer of ``halftune doctor --json``: what needs a look stands first, what is fine is folded."""
    # optional packages stand below, with what each is for
    checks = [one for one in answer["environment"] if one["name"] not in OPTIONAL or one["status"] == "fail"]
    odd = [one for status in ("fail", "note") for one in checks if one["status"] == status]
    fine = [one for one in checks if one["status"] == "ok"]
    problems = answer.get("error", {}).get("problems", [])
    return render("doctor", trace=answer.get("trace"), problems=problems, odd=odd, fine=fine, words=words)
