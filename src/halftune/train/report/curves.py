"""The charts over steps: loss, learning rate, gradient norm, speed."""

from __future__ import annotations

from halftune.train.quantities import count, rate
from halftune.train.report.chart import Line, line_chart
from halftune.train.report.curve import curve, smooth, speed
from halftune.train.report.html import Html, element, section
from halftune.train.report.record import Record


def curves(record: Record) -> Html:
    """The section of charts."""
    training, evaluation = curve(record.training, "loss"), curve(record.evaluations, "eval_loss")
    crowded = len(training.steps) > 30
    lines = [Line("training", training, "raw" if crowded else "main")]
    if crowded:
        lines.append(Line("smoothed", smooth(training), "main"))
    lines.append(Line("evaluation", evaluation, "eval", dots=True))
    small = [
        line_chart("Learning rate", [Line("learning rate", curve(record.training, "learning_rate"))], spell=rate),
        line_chart("Gradient norm", [Line("gradient norm", curve(record.training, "grad_norm"))]),
        line_chart("Tokens per second", _speeds(record), spell=count),
        line_chart("Loss scale", [Line("loss scale", curve(record.training, "loss_scale"))], spell=count),
    ]
    small = [chart for chart in small if chart]
    return section(
        "curves",
        "Curves",
        line_chart("Loss, nats per trained token", lines, wide=True),
        element("div", small, class_="charts") if small else None,
    )


def _speeds(record: Record) -> list[Line]:
    names = (("all", "tokens", "raw"), ("not padding", "tokens_real", "main"), ("trained", "tokens_trained", "eval"))
    return [Line(name, speed(record.training, column), style) for name, column, style in names]
