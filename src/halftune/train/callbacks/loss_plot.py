"""``loss.png``: the training loss, raw and smoothed, and the evaluations, after every evaluation and at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halftune.core.atomic import whole_file
from halftune.core.quantities import significant
from halftune.core.run_metrics import read_metrics
from halftune.train.callback import Callback
from halftune.train.report.series import Curves, Points, Series, smoothed, thinned
from halftune.train.state import TrainState

NAME = "loss.png"
_INK, _SOFT, _LINE, _EVAL = "#23211d", "#77726a", "#1f5f8b", "#b4512a"


class LossPlot(Callback):
    """Draws what ``metrics.jsonl`` holds, so it comes after the callback that writes it."""

    watches = True

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Draws the plot so far."""
        self._draw(run)

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Draws the whole plot, also of a run that was stopped."""
        self._draw(run)

    def _draw(self, run: TrainState) -> None:
        if not run.is_main:
            return
        curves = Curves()
        for line in read_metrics(run.folder):
            curves.take(line)
        if curves.series:
            name = run.config.logging.run_name or run.folder.name
            evaluations = {"evaluation": curves["eval_loss"]}
            evaluations |= {label: curves[series] for label, series in curves.eval_sets().items()}
            draw(run.folder / NAME, name, curves["loss"], evaluations)


def draw(path: Path, title: str, training: Series, evaluations: dict[str, Series]) -> None:
    """Writes the plot to ``path``.

    Args:
        path, title: of the plot.
        training: the training loss.
        evaluations: losses of evaluations by label, that over all sets first.

    Raises:
        OSError: the file cannot be written.
    """
    # Figures of their own, without pyplot: no display, no window, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    def plot(points: Points, **style: Any) -> None:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, [math.nan if value is None else value for value in values], **style)

    if training:
        smooth = smoothed(training)
        style = {"alpha": 0.25, "linewidth": 0.8} if smooth else {"linewidth": 1.8}
        plot(thinned(training), color=_LINE, label=f"training, last {significant(training.values[-1])}", **style)
        if smooth:
            plot(smooth, color=_LINE, linewidth=2.0, label="training, smoothed")
    for index, (name, evaluation) in enumerate((name, one) for name, one in evaluations.items() if one):
        best = min(filter(math.isfinite, evaluation.values), default=math.nan)
        style = {"color": f"C{index}", "linewidth": 0.8} if index else {"color": _EVAL, "linewidth": 1.6}
        plot(thinned(evaluation), marker="o", markersize=5, label=f"{name}, best {significant(best)}", **style)
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=14, parse_math=False)
    axes.set_xlabel("optimizer step", color=_SOFT, labelpad=8)
    axes.set_ylabel("loss", color=_SOFT, labelpad=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bdb8ae")
    axes.tick_params(colors=_SOFT, length=0)
    axes.grid(axis="y", color="#e8e4dc", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, labelcolor=_INK)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
