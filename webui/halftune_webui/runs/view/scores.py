"""An evaluation for the page: scores with the best one marked, differences with their errors, plot and answers."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halftune.core.quantities import significant
from halftune_webui.labels import Words

LOWER = ("loss", "perplexity")  # of these, less is better
Read = Callable[[str], bytes]
Answers = Callable[[str], list[dict[str, Any]]]


def scores_of(answer: dict[str, Any], read: Read, answers: Answers, words: Words) -> dict[str, Any]:
    """What the page shows of an evaluation, as strings.

    Args:
        answer: of ``halftune evaluate --json``; anybody may have written it.
        read: the bytes of one of its files, by name.
        answers: the first answers in one of its files, by name.
        words: the labels.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the answer is not one of the verb.
    """
    models, files = answer["models"], [str(one) for one in answer["files"]]
    names = _names(models, words)
    metrics = list(dict.fromkeys(name for one in models for name in one["metrics"]))
    plot = read(next((one for one in files if one.endswith(".png")), ""))
    listed = [one for one in files if Path(one).name.startswith("answers-")]
    asked = [name for name, one in zip(names, models, strict=True) if one["prompts"]]
    given = {name: answers(file) for name, file in zip(asked, listed, strict=False)}
    return {
        "what": words.said(str(answer["rows"])),
        "sizes": _sizes(models[0], words),
        "names": list(zip(names, [str(one["compute"]) for one in models], strict=True)),
        "rows": [_row(name, models, words) for name in metrics],
        "apart": len(models) > 1,
        "notes": [words.said(str(one)) for one in answer["notes"]],
        "plot": b64encode(plot).decode() if plot else "",
        "asked": list(given),
        "answers": _beside(given),
    }


def _names(models: list[dict[str, Any]], words: Words) -> list[str]:
    alone = sum(bool(one["base"]) for one in models) == 1
    base = [words("evaluate.base_of", name="" if alone else one["name"]).strip() for one in models]
    return [base[index] if one["base"] else str(one["name"]) for index, one in enumerate(models)]


def _sizes(first: dict[str, Any], words: Words) -> str:
    counts = (("rows", first["rows"]), ("tokens", first["tokens"]), ("prompts", first["prompts"]))
    return " · ".join(words(f"evaluate.counts.{name}", n=f"{count:,}") for name, count in counts if count)


def _row(metric: str, models: list[dict[str, Any]], words: Words) -> dict[str, Any]:
    """A metric: its name, and for each model the score, whether it is the best one, and the difference."""
    found = [one["metrics"].get(metric) or {} for one in models]
    sign = -1 if metric in LOWER else 1
    values = [one.get("value") for one in found]
    known = [sign * value for value in values if value is not None and math.isfinite(value)]
    best = max(known) if len(known) > 1 and min(known) < max(known) else None
    cells = [
        {
            "value": "–" if value is None else significant(value),
            "best": value is not None and sign * value == best,
            **_difference(one, sign),
        }
        for one, value in zip(found, values, strict=True)
    ]
    return {"name": words.table.get(f"evaluate.metrics.{metric}", metric), "cells": cells}


def _difference(cell: dict[str, Any], sign: int) -> dict[str, str]:
    """The difference from the first model: better or worse by more than two standard errors, or neither."""
    apart, error = cell.get("difference"), cell.get("difference_error")
    if apart is None:
        return {"apart": "", "mark": ""}
    text = ("+" if apart > 0 else "") + significant(apart, 3)
    if error is None:
        return {"apart": text, "mark": ""}
    beyond = abs(apart) > 2 * error
    mark = ("better" if sign * apart > 0 else "worse") if beyond else ""
    return {"apart": f"{text} ± {significant(error, 2)}", "mark": mark}


def _beside(given: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Rows of prompt, reference and each model's answer."""
    every = list(given.values())
    return [
        (_prompt(rows[0]["prompt"]), str(rows[0]["reference"]), *(str(row["answer"]) for row in rows))
        for rows in zip(*every, strict=False)
    ]


def _prompt(asked: Any) -> str:
    """The last message of a conversation, or the prompt itself."""
    said = asked[-1]["content"] if isinstance(asked, list) else asked
    return said if isinstance(said, str) else " ".join(str(part.get("text", "…")) for part in said)
