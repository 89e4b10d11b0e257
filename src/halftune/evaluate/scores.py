"""The scores of all models beside each other: a table, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halftune.bench.table import aligned
from halftune.core.quantities import significant
from halftune.evaluate.compare import Difference, difference
from halftune.evaluate.harness import TaskScore
from halftune.evaluate.measure import Measured
from halftune.evaluate.metrics import LOSS, PERPLEXITY, AnswerMetric, Metric
from halftune.train.window import finite

ERRORS = "standard error: paired jackknife over rows; of tasks: lm-evaluation-harness's, as of independent runs"
OTHER_TOKENS = "tokens or labels differ between models: their losses per token do not compare"
OTHER_DTYPES = "models compute in different dtypes; precision=… sets one for all"
OTHER_ROWS = "some rows are left out for some models: differences have no standard error"


@dataclass(frozen=True)
class Cell:
    """A score.

    Attributes:
        value: the number.
        difference: from the first model's; None for the first.
        error: of the value itself, where the harness gives one.
    """

    value: float
    difference: Difference | None = None
    error: float | None = None


@dataclass(frozen=True)
class Scores:
    """All numbers.

    Attributes:
        what: the rows, in words; empty without.
        models: in the order of the columns.
        metrics: in the order of the table's rows.
        cells: by the metric's name, one for each model; None: not measured.
        notes: what a reader has to know.
    """

    what: str
    models: Sequence[Measured]
    metrics: Sequence[Metric]
    cells: dict[str, list[Cell | None]]
    notes: tuple[str, ...] = ()


def compare(what: str, models: Sequence[Measured], answered: Sequence[AnswerMetric]) -> Scores:
    """Score all models, and compare each with the first.

    Args:
        what: the rows, in words.
        models: all were measured in the same way.
        answered: metrics of their answers.
    """
    first, metrics, cells = models[0], list[Metric](), dict[str, list[Cell | None]]()
    if first.losses is not None:
        paired = [one.origins == first.origins for one in models]
        stats = [one.losses for one in models if one.losses is not None]
        for metric in (LOSS, PERPLEXITY):
            metrics.append(metric)
            cells[metric.name] = _cells(metric, stats, paired)
    for each in answered:
        metrics.append(each.metric)
        paired = [_asked(one) == _asked(first) for one in models]
        stats = [each.rows(one.answers, [asked.reference for asked in one.questions]) for one in models]
        cells[each.metric.name] = _cells(each.metric, stats, paired)
    for name in dict.fromkeys(name for one in models for name in one.tasks):
        found = [one.tasks.get(name) for one in models]
        known = next(one for one in found if one is not None)
        metrics.append(Metric(name, name, lambda _: math.nan, 1 if known.higher else -1))
        cells[name] = [_task_cell(one, found[0], index) for index, one in enumerate(found)]
    return Scores(what, models, metrics, cells, tuple(_notes(models)))


def _asked(one: Measured) -> list[Any]:
    return [asked.origin for asked in one.questions]


def _cells(metric: Metric, stats: Sequence[np.ndarray], paired: Sequence[bool]) -> list[Cell | None]:
    first, cells = stats[0], list[Cell | None]()
    for index, (rows, same) in enumerate(zip(stats, paired, strict=True)):
        apart = difference(first, rows, metric.score, paired=same) if index else None
        cells.append(Cell(metric.score(rows.sum(axis=0)), apart))
    return cells


def _task_cell(score: TaskScore | None, first: TaskScore | None, index: int) -> Cell | None:
    if score is None:
        return None
    if not index or first is None:
        return Cell(score.value, error=score.error)
    error = None if score.error is None or first.error is None else math.hypot(score.error, first.error)
    return Cell(score.value, Difference(score.value - first.value, error), score.error)


def _notes(models: Sequence[Measured]) -> list[str]:
    first, notes = models[0], list[str]()
    if any(one.tokens != first.tokens for one in models):
        notes.append(OTHER_TOKENS)
    if any(one.compute != first.compute for one in models):
        notes.append(OTHER_DTYPES)
    if any(one.origins != first.origins or _asked(one) != _asked(first) for one in models):
        notes.append(OTHER_ROWS)
    return notes


def column_names(models: Sequence[Measured]) -> list[str]:
    """Headings: ``base`` for a single base model."""
    bases = sum(one.is_base for one in models)
    return [one.name if not one.is_base else "base" if bases == 1 else f"base {one.name}" for one in models]


def table(scores: Scores) -> str:
    """The scores as text: models in columns, differences from the first one with their standard errors."""
    names = column_names(scores.models)
    lines = [["", *names]]
    for metric in scores.metrics:
        cells = scores.cells[metric.name]
        lines.append([metric.title, *(_spelt(cell) for cell in cells)])
        if len(cells) > 1:
            lines.append([f"  minus {names[0]}", "", *(_apart(cell, metric) for cell in cells[1:])])
    said = aligned(lines, right=True)
    if scores.what:
        said.insert(0, f"{scores.what}: {_size(scores.models[0])}")
    said += [f"note: {one}" for one in scores.notes]
    if any(cell is not None and cell.difference is not None for row in scores.cells.values() for cell in row):
        said.append(f"± {ERRORS}; ✓ better, ✗ worse by more than two of them")
    return "\n".join(said)


def _size(one: Measured) -> str:
    if one.losses is None:
        return f"{len(one.questions):,} prompts"
    prompts = f", {len(one.questions):,} prompts" if one.questions else ""
    return f"{len(one.losses):,} rows, {int(one.losses[:, 1].sum()):,} trained tokens{prompts}"


def _spelt(cell: Cell | None) -> str:
    return "-" if cell is None else significant(cell.value)


def _apart(cell: Cell | None, metric: Metric) -> str:
    if cell is None or cell.difference is None:
        return "-"
    apart = cell.difference
    sign = "+" if apart.value > 0 else ""
    error = "" if apart.error is None else f" ± {significant(apart.error, 2)}"
    mark = ("✓" if apart.value * metric.better > 0 else "✗") if apart.marked else " "
    return f"{sign}{significant(apart.value, 3)}{error} {mark}"


def as_json(scores: Scores) -> dict[str, Any]:
    """All numbers, JSON-able."""
    return {
        "rows": scores.what,
        "models": [
            {
                "name": one.name,
                "path": one.path,
                "base": one.is_base,
                "compute": one.compute,
                "rows": None if one.losses is None else len(one.losses),
                "tokens": None if one.losses is None else int(one.losses[:, 1].sum()),
                "prompts": len(one.questions),
                "seconds": {kind: round(number, 3) for kind, number in one.seconds.items()},
                "metrics": {name: _cell_json(cells[index]) for name, cells in scores.cells.items() if cells[index]},
            }
            for index, one in enumerate(scores.models)
        ],
        "standard_error": ERRORS,
        "notes": list(scores.notes),
    }


def _cell_json(cell: Cell | None) -> dict[str, Any]:
    assert cell is not None
    apart = cell.difference
    made = {"value": finite(cell.value), "error": cell.error}
    if apart is not None:
        made |= {"difference": finite(apart.value), "difference_error": apart.error}
    return made
