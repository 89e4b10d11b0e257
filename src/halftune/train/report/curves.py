"""The charts over steps, drawn in the reader's browser by the script that also draws those of the web UI."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from markupsafe import Markup

from halftune.core.templates import render
from halftune.train.report.record import HERE, Record
from halftune.train.report.series import Curves

# chart → line → series
_CHARTS = {
    "loss": {"training": "loss", "evaluation": "eval_loss"},
    "learning_rate": {"training": "learning_rate"},
    "grad_norm": {"training": "grad_norm"},
    "tokens_per_second": {
        "training": "tokens_per_second",
        "not padding": "tokens_real_per_second",
        "trained": "tokens_trained_per_second",
    },
    "loss_scale": {"training": "loss_scale"},
}
_WORDS = {
    "loss": "Loss, nats per trained token",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "loss_scale": "Loss scale",
    "raw": "every step",
    "smooth": "smoothed",
    "log": "logarithmic loss",
    "all": "Show all steps",
    "step": "step",
    "over": "over",
    "axes": {"step": "steps", "tokens": "tokens", "time": "time"},
    "save": "Save as",
    "odd": "not a number",
    "nothing": "no numbers in this stretch",
    "hint": "Drag over a curve to zoom in, double-click to see all of it again.",
}


def curves(record: Record) -> Markup:
    """The section of charts."""
    found = Curves()
    for line in (*record.training, *record.evaluations):
        found.take(line)
    own = found.own()
    every = _CHARTS | {name: {"training": name, "evaluation": f"eval_{name}"} for name in own}
    charts = []
    for name, lines in every.items():
        there = {line: series for line, series in lines.items() if found[series]}
        drawn = [found.line(line, series, smooth=name == "loss") for line, series in there.items()]
        charts += [{"name": name, "lines": drawn, "wide": name == "loss"}] if drawn else []
    if not charts:
        return Markup()
    names = list(dict.fromkeys(line["run"] for chart in charts for line in chart["lines"]))
    value = {"runs": names, "charts": charts, "scales": dict.fromkeys(names, found.scale())}
    words = _WORDS | ({"loss": "Loss per pair"} if own else {})
    data = json.dumps({"words": json.dumps(words), "value": json.dumps(value)}).replace("<", "\\u003c")
    return render(HERE, "curves", data=Markup(data), script=Markup(script()))


def chart_script() -> str:
    """The script that draws charts: the body of a function of ``element``, ``props`` and ``watch``."""
    return files(HERE).joinpath("charts.js").read_text(encoding="utf-8")


@cache
def script() -> str:
    """The script of the page, the same in every report."""
    return (
        f"((element, props, watch) => {{\n{chart_script()}}})(document.getElementById('charts'), "
        "JSON.parse(document.getElementById('series').textContent), () => {});"
    )


def script_source() -> str:
    """The script as a Content-Security-Policy names it: a page that shows a report lets no other script run."""
    return f"'sha256-{b64encode(sha256(script().encode()).digest()).decode()}'"
