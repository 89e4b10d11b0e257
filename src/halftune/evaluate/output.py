"""Writes an evaluation: ``scores.json``, ``scores.png``, and the answers of each model as JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halftune.core.atomic import whole_file, write_error_remedy, write_text
from halftune.core.errors import TrainingError
from halftune.evaluate.measure import Measured
from halftune.evaluate.metrics import AnswerMetric
from halftune.evaluate.plot import draw
from halftune.evaluate.scores import Scores, column_names

FOLDER, SCORES, PLOT = "evaluation", "scores.json", "scores.png"


def write(folder: Path, scores: Scores, answered: Sequence[AnswerMetric], made: dict[str, Any]) -> list[Path]:
    """Write all files of an evaluation; returns their paths.

    Args:
        folder: made where it is missing.
        scores: to plot.
        answered: metrics of answers, whose per-row means are written beside each answer.
        made: the content of ``scores.json``.

    Raises:
        TrainingError: the folder cannot be written.
    """
    files = [folder / SCORES, folder / PLOT]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(files[0], json.dumps(made, indent=1, ensure_ascii=False) + "\n")
        with whole_file(files[1]) as beside:
            draw(beside, scores)
        for name, one in zip(column_names(scores.models), scores.models, strict=True):
            if one.questions:
                files.append(folder / f"answers-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.jsonl")
                write_text(files[-1], _lines(one, answered))
    except OSError as error:
        what = f"cannot write: {error}"
        remedy = f"{write_error_remedy(error)}, or choose another folder with --output"
        raise TrainingError(what, where=str(folder), remedy=remedy, code="core.cannot_write") from error
    return files


def _lines(one: Measured, answered: Sequence[AnswerMetric]) -> str:
    references = [asked.reference for asked in one.questions]
    stats = {each.metric.name: each.rows(one.answers, references) for each in answered}
    lines = []
    for number, (asked, answer) in enumerate(zip(one.questions, one.answers, strict=True)):
        file, unit, place = asked.origin
        line = {"row": f"{file} {unit} {place}", "prompt": asked.text, "reference": asked.reference, "answer": answer}
        scored = {each.metric.name: each.metric.score(stats[each.metric.name][number]) for each in answered}
        lines.append(json.dumps(line | scored, ensure_ascii=False) + "\n")
    return "".join(lines)
