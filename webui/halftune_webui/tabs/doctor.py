"""The Doctor tab: ``halftune doctor`` on this environment, and on the recipe of the Train tab."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import gradio as gr

from halftune.core.errors import HalftuneError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune_webui.context import Context
from halftune_webui.labels import Words
from halftune_webui.planning import HERE
from halftune_webui.recipe import examine
from halftune_webui.runs.ask import ask, recipe_file
from halftune_webui.tabs.data import failed, waiting
from halftune_webui.tabs.runs import live

_ANSWERS = (0, 1, 2, 3)  # 1: something is not well; 2, 3: the recipe or the model is wrong, said in the answer


def build(context: Context) -> None:
    """What to look at, and what was found."""
    words, settings = context.words, context.settings
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
        button = gr.Button(words("doctor.start"), variant="primary", elem_id="doctor-start")
    found = live("doctor-found")

    def look(text: str, with_recipe: bool, name: str, with_kernels: bool) -> Iterator[str]:
        options = ["--kernels"] if with_kernels else []
        options += ["--hardware", name] if name in CATALOGUE else []
        examined = examine(text or "", settings) if with_recipe else None
        if examined is not None and examined.problems:
            yield failed("\n".join(map(words.problem, examined.problems)))
            return
        yield waiting(words("doctor.looking"))
        try:
            if examined is None:
                answer = ask("doctor", *options, good=_ANSWERS)
            else:
                with recipe_file(settings.runs, examined.runnable) as file:
                    answer = ask("doctor", *options, good=_ANSWERS, recipe=file)
        except HalftuneError as error:
            yield failed(str(error))
        else:
            yield doctor_view(answer, words)

    asked = [context.recipe, recipe, machine, kernels]
    button.click(look, asked, found, show_progress="hidden", api_visibility="private")


def doctor_view(answer: dict[str, Any], words: Words) -> str:
    """The answer of ``halftune doctor --json``."""
    parts = [_trace(answer["trace"], words)] if "trace" in answer else []
    for problem in answer.get("error", {}).get("problems", []):
        parts.append(failed(" · ".join(filter(None, (problem["where"], problem["what"], problem["remedy"])))))
    styles = {"ok": "ok", "note": "warn", "fail": "fail"}
    rows = "".join(
        f'<tr><td class="{styles[check["status"]]}">{escape(words("doctor." + check["status"]))}</td>'
        f"<td><b>{escape(check['name'])}</b></td><td>{escape(check['what'])}"
        + (f'<pre class="command">{escape(check["remedy"])}</pre>' if check["remedy"] else "")
        + "</td></tr>"
        for check in answer["environment"]
    )
    title = f"<header><h3>{escape(words('doctor.environment'))}</h3></header>"
    return "".join(parts) + f'<section class="card">{title}<table><tbody>{rows}</tbody></table></section>'


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
    lines += [f'<p class="alarm">{escape(note)}</p>' for note in trace["notes"]]
    return f'<section class="card"><header><h3>{escape(words("doctor.trace"))}</h3></header>{"".join(lines)}</section>'
