"""The check of an export as HTML: the verdict, what each step saw, and what differs, with cause and remedy."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.runs.ask import problems_in
from halftune_webui.runs.state import RunState
from halftune_webui.runs.view.show import ending

_NUMBERS = ("to_trained", "to_base", "kl", "agreement")


def verdict_view(job: str, state: RunState, answer: dict[str, Any], log: str, words: Words) -> Markup:
    """How a check stands, or what it has found.

    Args:
        job: the export's job folder, for the button that stops the check.
        state: of the check.
        answer: of ``halftune verify --json``; anybody may have written it.
        log: what the check printed last.
        words: the labels.
    """
    shown: dict[str, Any] = {"job": job, "state": state, "log": log, "same": None, "lines": [], "findings": []}
    shown["problems"] = failure_of(state, answer, words)
    if not state.live and not shown["problems"]:
        try:
            shown |= _found(answer, words)
        except (KeyError, TypeError, ValueError, AttributeError):
            shown["problems"] = words("check.unreadable")
    return render("verdict", **shown, words=words)


def failure_of(state: RunState, answer: dict[str, Any], words: Words) -> str:
    """Why a verb with ``--json`` has no answer; empty where it has one, or works."""
    if state.live:
        return ""
    try:
        if problems := "\n".join(map(words.problem, problems_in(answer))):
            return problems
    except (KeyError, TypeError, AttributeError):
        return words("check.unreadable")
    return ending(state, words) if state.state != "stopped" else words("runs.states.stopped")


def _found(answer: dict[str, Any], words: Words) -> dict[str, Any]:
    """The verdict and its rows, of strings alone."""
    numbers = {name: float(value) for name, value in answer["numbers"].items() if value is not None}
    told = [words(f"check.numbers.{name}", value=_number(name, numbers[name])) for name in _NUMBERS if name in numbers]
    weights = {"weights": " · ".join(told)} if told else {}
    if told and "expected" in numbers:
        weights["rounding"] = words("check.numbers.expected", value=_number("expected", numbers["expected"]))
    lines = [(str(step), weights.get(str(step)) or words.said(str(text))) for step, text in answer["lines"]]
    findings = [
        {
            "code": str(one["code"]),
            "name": words.table.get(f"check.codes.{one['code']}", ""),
            **{key: words.said(str(one[key])) for key in ("what", "cause", "remedy", "source")},
        }
        for one in answer["findings"]
    ]
    bits = numbers.get("to_trained") == 0
    verdict = "differs" if findings else "bits" if bits else "same"
    steps = [(words.table.get(f"check.steps.{step}", step), text) for step, text in lines]
    return {"same": not findings, "verdict": words(f"check.{verdict}"), "lines": steps, "findings": findings}


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "agreement" else f"{value:.2g}"
