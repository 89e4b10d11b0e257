"""``scores.png``: a panel for each metric, a bar for each model."""

from __future__ import annotations

import math
from pathlib import Path

from halftune.core.quantities import significant
from halftune.evaluate.scores import Cell, Scores, column_names

_INK, _SOFT, _TUNED, _BASE = "#23211d", "#77726a", "#1f5f8b", "#bdb8ae"
_ACROSS = 3  # panels beside each other


def draw(path: Path, scores: Scores) -> None:
    """Write the plot; lines on bars are standard errors of the differences from the first model, or of tasks.

    Raises:
        OSError: the file cannot be written.
    """
    # Figures of their own, without pyplot: no display, no window, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count, names = len(scores.metrics), column_names(scores.models)
    across, down = min(count, _ACROSS), math.ceil(count / _ACROSS)
    figure = Figure(figsize=(4 * across, 0.6 + (0.9 + 0.4 * len(names)) * down), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    colours = [_BASE if one.is_base else _TUNED for one in scores.models]
    for number, metric in enumerate(scores.metrics):
        axes = figure.add_subplot(down, across, number + 1)
        cells = scores.cells[metric.name]
        values = [math.nan if cell is None else cell.value for cell in cells]
        bars = axes.barh(range(len(names)), values, color=colours, height=0.6, xerr=[_error(cell) for cell in cells])
        axes.bar_label(bars, [significant(value) for value in values], padding=4, color=_INK, fontsize=8)
        axes.set_yticks(range(len(names)), names)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_title(metric.title, loc="left", fontsize=10, color=_INK, parse_math=False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(colors=_SOFT, length=0, labelsize=8)
    if scores.what:
        figure.suptitle(scores.what, x=0.01, ha="left", fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")


def _error(cell: Cell | None) -> float:
    if cell is None:
        return 0.0
    apart = None if cell.difference is None else cell.difference.error
    return cell.error or apart or 0.0
