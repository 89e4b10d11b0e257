"""``loss.png``: the training loss, raw and smoothed, and the evaluations, after every evaluation and at the end."""

from __future__ import annotations

from pathlib import Path

from halftune.core.atomic import whole_file
from halftune.train.callbacks.base import Callback, Run
from halftune.train.callbacks.metrics import read_metrics
from halftune.train.quantities import significant
from halftune.train.report.curve import Curve, curve, smooth, thin

NAME = "loss.png"
_INK, _SOFT, _LINE, _EVAL = "#23211d", "#77726a", "#1f5f8b", "#b4512a"


class LossPlot(Callback):
    """Draws what ``metrics.jsonl`` holds, so it comes after the callback that writes it."""

    watches = True

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        """Draws the plot so far."""
        self._draw(run)

    def on_end(self, run: Run, error: BaseException | None) -> None:
        """Draws the whole plot, also of a run that was stopped."""
        self._draw(run)

    def _draw(self, run: Run) -> None:
        if not run.is_main:
            return
        lines = list(read_metrics(run.folder))
        training, evaluation = curve(lines, "loss"), curve(lines, "eval_loss")
        if not training and not evaluation:
            return
        name = run.config.logging.run_name or run.folder.name
        draw(run.folder / NAME, name, training, evaluation)


def draw(path: Path, title: str, training: Curve, evaluation: Curve) -> None:
    """Writes the plot to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    # Figures of their own, without pyplot: no display, no window, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    crowded = len(training.steps) > 30
    if training:
        raw, smoothed = thin(training, 4000), thin(smooth(training), 4000)
        style = {"color": _LINE, "alpha": 0.25, "linewidth": 0.8} if crowded else {"color": _LINE, "linewidth": 1.8}
        axes.plot(raw.steps, raw.values, label=f"training, last {significant(training.values[-1])}", **style)
        if crowded:
            axes.plot(smoothed.steps, smoothed.values, color=_LINE, linewidth=2.0, label="training, smoothed")
    if evaluation:
        best = min(evaluation.values)
        axes.plot(
            evaluation.steps,
            evaluation.values,
            color=_EVAL,
            linewidth=1.6,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=f"evaluation, best {significant(best)}",
        )
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=14, parse_math=False)
    axes.set_xlabel("optimizer step", color=_SOFT, labelpad=8)
    axes.set_ylabel("loss, nats per trained token", color=_SOFT, labelpad=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bdb8ae")
    axes.tick_params(colors=_SOFT, length=0)
    axes.grid(axis="y", color="#e8e4dc", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.legend(frameon=False, labelcolor=_INK)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")
