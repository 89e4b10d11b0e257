"""What the page is told after every change: the fields, their problems, what cannot run here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from halftune.config.tree import KeyPath, KeyProblem, dotted
from halftune.core.errors import HalftuneError
from halftune_webui.labels import Words
from halftune_webui.plans.planning import Outlook
from halftune_webui.recipes.edits import path_of
from halftune_webui.recipes.form import Group, Row, form, shown
from halftune_webui.recipes.recipe import Examined
from halftune_webui.recipes.yaml_edit import child_at


def form_state(
    examined: Examined,
    outlook: Outlook | None,
    words: Words,
    seq: int = 0,
    machine: str = "",
    more: Sequence[HalftuneError] = (),
) -> str:
    """The form's state as JSON.

    Args:
        examined: the recipe.
        outlook: its plan, where it has one.
        words: the labels.
        seq: number of the change that this answers.
        machine: the one that the plan is for, where it is not this one.
        more: problems beside those of the recipe and the plan.
    """
    groups = form()
    values = examined.values
    counts = dict(_counts(groups, values))
    known = list(_paths(groups, counts))
    beside: dict[str, list[str]] = {}
    planned = outlook.problem if outlook is not None else None
    for problem in (*examined.problems, *more, *(planned.problems if planned else ())):
        place = place_of(problem, known)
        if place:
            beside.setdefault(place, []).append(words.problem(problem, place=False))
    state = {
        "seq": seq,
        "readable": values is not None,
        "text": examined.text,
        "keep": not examined.secret,
        "fields": dict(shown(values)) if values is not None else {},
        "entries": counts,
        "problems": beside,
        "impossible": _impossible(outlook, words),
        "machine": machine,
        "outcome": _outcome(outlook, words),
    }
    return json.dumps(state, ensure_ascii=False)


def _impossible(outlook: Outlook | None, words: Words) -> dict[str, dict[str, str]]:
    found = outlook.impossible if outlook is not None else {}
    return {path: {word: words.said(why) for word, why in reasons.items()} for path, reasons in found.items()}


def _outcome(outlook: Outlook | None, words: Words) -> dict[str, tuple[str, str]]:
    """What the plan made of the choices that may say ``auto``: dotted key → (value, reason)."""
    if outlook is None or outlook.plan is None:
        return {}
    plan = outlook.plan
    packing, linear = plan.batch.packing, plan.attention.linear
    made = {
        "precision.compute": (plan.precision.compute.value, plan.precision.compute.reason),
        "attention.backend": (plan.attention.softmax.value, plan.attention.softmax.reason),
        "attention.linear": (linear.value, linear.reason),
        "data.packing.enabled": (str(packing.value).lower(), packing.reason),
    }
    return {path: (value, words.said(reason)) for path, (value, reason) in made.items()}


def place_of(problem: HalftuneError, known: list[str]) -> str:
    """The field that a problem is shown at: its own, else its list's or section's first one; empty for none."""
    key = problem.key if isinstance(problem, KeyProblem) else _named(problem.where)
    for end in range(len(key), 0, -1):
        path = dotted(key[:end])
        if path in known:
            return path
        below = [other for other in known if other.startswith((f"{path}.", f"{path}["))]
        if below:
            return below[0]
    return ""


def _named(where: str) -> KeyPath:
    """The key that a plan's problem names as its place."""
    try:
        return path_of(where)
    except HalftuneError:
        return ()


def _counts(groups: tuple[Group, ...], values: Any) -> Iterator[tuple[str, int]]:
    for row in (row for group in groups for row in group.rows if row.kind == "entries"):
        found = child_at(values, path_of(row.path))
        yield row.path, len(found) if isinstance(found, list) else 0


def _paths(groups: tuple[Group, ...], counts: dict[str, int]) -> Iterator[str]:
    rows: list[Row] = [row for group in groups for row in group.rows]
    for row in rows:
        yield row.path
        for index in range(counts.get(row.path, 0)):
            yield from (f"{row.path}[{index}].{inner.path}" for inner in row.rows)
