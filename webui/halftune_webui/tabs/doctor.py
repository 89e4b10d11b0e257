"""The Doctor tab: this machine, and ``halftune doctor`` on the environment and on the recipe of the Train tab."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.probe import probe
from halftune_webui.context import Context
from halftune_webui.labels import Words
from halftune_webui.machine_panel import OPTIONAL, free_of, machine_view
from halftune_webui.planning import HERE
from halftune_webui.recipe import examine
from halftune_webui.runs.ask import Asks, Stopped, recipe_file
from halftune_webui.tabs.data import failed, waiting
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
    board = Blocks.root_block
    assert board is not None

    def look(text: str, with_recipe: bool, name: str, with_kernels: bool, request: gr.Request) -> Iterator[list[Any]]:
        options = ["--kernels"] if with_kernels else []
        options += ["--hardware", name] if name in CATALOGUE else []
        yield [waiting(words("doctor.looking")), gr.Button(interactive=True)]
        shown = _examine(context, asks, str(request.session_hash), text if with_recipe else None, options)
        yield [shown, gr.Button(interactive=False)]

    def stopped(request: gr.Request) -> None:
        asks.stop(str(request.session_hash))

    button.click(look, [context.recipe, recipe, machine, kernels], [found, stop], **quiet)
    stop.click(stopped, None, None, queue=False, api_visibility="private")
    for event in (board.load, again.click):
        event(lambda: machine_view(probe(), free_of(context.settings.runs), words), None, facts, **quiet)
    board.unload(stopped)


def _examine(context: Context, asks: Asks, page: str, text: str | None, options: list[str]) -> str:
    """What the doctor finds, as HTML, or why it finds nothing; ``text`` is None where no recipe is looked at."""
    words, settings = context.words, context.settings
    examined = examine(text, settings) if text is not None else None
    if examined is not None and examined.problems:
        return failed("\n".join(map(words.problem, examined.problems)))
    try:
        if examined is None:
            return doctor_view(asks.ask(page, "doctor", *options, good=_ANSWERS), words)
        with recipe_file(settings.runs, examined.runnable) as file:
            return doctor_view(asks.ask(page, "doctor", *options, good=_ANSWERS, recipe=file), words)
    except Stopped:
        return f'<p class="help">{escape(words("data.stopped"))}</p>'
    except HalftuneError as error:
        return failed(words.said(str(error)))


def doctor_view(answer: dict[str, Any], words: Words) -> str:
    """The answer of ``halftune doctor --json``: what needs a look stands first, what is fine is folded."""
    parts = [_trace(answer["trace"], words)] if "trace" in answer else []
    for problem in answer.get("error", {}).get("problems", []):
        said = (problem["where"], words.said(problem["what"]), words.said(problem["remedy"]))
        parts.append(failed(" · ".join(filter(None, said))))
    # optional packages stand below, with what each is for
    checks = [one for one in answer["environment"] if one["name"] not in OPTIONAL or one["status"] == "fail"]
    odd = [one for status in ("fail", "note") for one in checks if one["status"] == status]
    fine = [one for one in checks if one["status"] == "ok"]
    verdict = words("doctor.odd", n=len(odd)) if odd else words("doctor.all_fine")
    title = f"<header><h3>{escape(words('doctor.environment'))}</h3></header>"
    body = f'<p class="{"warn" if odd else "ok"}"><b>{escape(verdict)}</b></p>{_checks(odd, words) if odd else ""}'
    folded = f"<summary>{escape(words('doctor.fine', n=len(fine)))}</summary>{_checks(fine, words)}"
    return "".join(parts) + f'<section class="card">{title}{body}<details data-keep="fine">{folded}</details></section>'


def _checks(checks: list[dict[str, str]], words: Words) -> str:
    styles = {"ok": "ok", "note": "warn", "fail": "fail"}
    rows = "".join(
        f'<tr><td class="{styles[check["status"]]}">{escape(words("doctor." + check["status"]))}</td>'
        f"<td><b>{escape(check['name'])}</b></td><td>{escape(words.said(check['what']))}"
        + (f'<pre class="command">{escape(words.said(check["remedy"]))}</pre>' if check["remedy"] else "")
        + "</td></tr>"
        for check in checks
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _trace(trace: dict[str, Any], words: Words) -> str:
    holds = trace["contract_holds"]
    verdict = words("doctor.holds" if holds else "doctor.breaks")
    lines = [f'<p class="{"ok" if holds else "fail"}"><b>{escape(verdict)}</b></p>']
    calls = ", ".join(f"{count} × {phase}" for phase, count in trace["calls"].items())
    about = f"{trace['model']} · {trace['machine']} · {trace['compute']} · {trace['attention']} · {calls}"
    lines.append(f'<p class="help">{escape(about)}</p>')
    for finding in trace["findings"]:
        where = f"{finding['file']}:{finding['line']}" if finding["file"] else ""
        arrives = words("doctor.arrives", **{name: finding[name] for name in ("operand", "arrives", "target")})
        text = "\n".join(filter(None, (arrives, finding["op"], where, finding["cause"], finding["guard"])))
        lines.append(f'<p class="{"cause" if finding["breaks"] else "cause calm"}">{escape(text)}</p>')
    lines += [f'<p class="alarm">{escape(words.said(note))}</p>' for note in trace["notes"]]
    return f'<section class="card"><header><h3>{escape(words("doctor.trace"))}</h3></header>{"".join(lines)}</section>'
