"""Charts as inline SVG: lines, histogram and a divided bar. They stretch; their text, which is HTML, does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halftune.train.quantities import count, significant
from halftune.train.report.curve import Curve, log_ticks, thin, ticks
from halftune.train.report.html import Content, Html, element

_SIZE = 1000.0  # of the plot in its own units, both ways
_BANDS = 160  # stretches that answer the mouse


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        name: in the legend and under the mouse.
        curve: its points.
        style: CSS class: ``raw | main | eval``.
        dots: whether points are marked (few points).
    """

    name: str
    curve: Curve
    style: str = "main"
    dots: bool = False


@dataclass(frozen=True)
class _Frame:
    """From data to the plot's units."""

    left: float
    right: float
    low: float
    high: float
    logarithmic: bool

    def x(self, step: float) -> float:
        return (step - self.left) / (self.right - self.left) * _SIZE

    def y(self, value: float) -> float:
        return (
            1 - (self._scale(value) - self._scale(self.low)) / (self._scale(self.high) - self._scale(self.low))
        ) * _SIZE

    def _scale(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.logarithmic else value


def line_chart(title: str, lines: list[Line], *, wide: bool = False, spell: object = significant) -> Html:
    """A chart of one or more series over steps, or nothing where no series has two points.

    Args:
        title: above the chart.
        lines: the series, drawn in order.
        wide: the main chart of the page.
        spell: callable that writes a value under the mouse.
    """
    lines = [line for line in lines if line.curve]
    if not any(len(line.curve.steps) > 1 for line in lines):
        return Html("")
    assert callable(spell)
    values = [value for line in lines for value in line.curve.values]
    steps = [step for line in lines for step in line.curve.steps]
    logarithmic = min(values) > 0 and max(values) / min(values) > 200
    marks = log_ticks(min(values), max(values)) if logarithmic else ticks(min(values), max(values), 8 if wide else 4)
    left = 0 if min(steps) < max(steps) / 10 else min(steps)
    frame = _Frame(left, max(steps), marks[0], marks[-1], logarithmic)
    across = [mark for mark in ticks(frame.left, frame.right, 6 if wide else 4) if frame.left <= mark <= frame.right]
    drawing = [_grid(frame, marks), [_path(frame, line) for line in lines], _bands(frame, lines, spell)]
    plot = element(
        "svg",
        drawing,
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} over steps",
    )
    return element(
        "figure",
        element("figcaption", element("b", title), _legend(lines)),
        element(
            "div",
            element("div", [_label(words, top=frame.y(mark)) for mark, words in _axis(marks)], class_="y"),
            element("div", plot, class_="plot"),
            element("div", "step", class_="unit"),
            element("div", [_label(count(mark), left=frame.x(mark)) for mark in across], class_="x"),
            class_="frame",
        ),
        class_="chart wide" if wide else "chart",
    )


def histogram(title: str, edges: list[float], counts: list[int], unit: str) -> Html:
    """Bars of ``counts[i]`` between ``edges[i]`` and ``edges[i + 1]``, drawn equally wide."""
    if not counts or not any(counts):
        return Html("")
    marks = ticks(0, max(counts), 4)
    width, bars = _SIZE / len(counts), []
    for index, number in enumerate(counts):
        height = number / marks[-1] * _SIZE
        words = f"{count(edges[index])}–{count(edges[index + 1])} {unit}: {count(number)}"
        shape = {"x": round(index * width + width * 0.06, 1), "width": round(width * 0.88, 1)}
        bar = element("rect", y=round(_SIZE - height, 1), height=round(height, 1), class_="bar", **shape)
        whole = element("rect", y=0, height=_SIZE, class_="band", **shape)
        bars.append(element("g", element("title", words), bar, whole))
    frame = _Frame(0, 1, 0, marks[-1], False)
    plot = element(
        "svg",
        _grid(frame, marks),
        bars,
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    every = max(1, round(len(edges) / 7))
    labels = [_label(count(edge), left=i * width) for i, edge in enumerate(edges) if i % every == 0]
    return element(
        "figure",
        element("figcaption", element("b", title)),
        element(
            "div",
            element("div", [_label(count(mark), top=frame.y(mark)) for mark in marks], class_="y"),
            element("div", plot, class_="plot"),
            element("div", unit, class_="unit"),
            element("div", labels, class_="x"),
            class_="frame",
        ),
        class_="chart wide low",
    )


def divided_bar(parts: list[tuple[str, float, str]], whole: float, marker: tuple[float, str] | None) -> Html:
    """One bar of named parts (name, amount, its spelling) out of ``whole``, with a marker across it, and its legend."""
    shown = [part for part in parts if part[1] > 0]
    if not shown or whole <= 0:
        return Html("")
    pieces, start = [], 0.0
    for index, (name, amount, words) in enumerate(shown):
        style = f"left:{start / whole:.4%};width:{amount / whole:.4%}"
        pieces.append(element("i", class_=f"p{index}", style=style, title=f"{name}: {words}"))
        start += amount
    if marker is not None:
        pieces.append(element("u", style=f"left:{min(marker[0] / whole, 1):.4%}", title=marker[1]))
    legend = [
        element("li", element("i", class_=f"p{index}"), name, " ", element("span", words, class_="v"))
        for index, (name, _, words) in enumerate(shown)
    ]
    if marker is not None:
        legend.append(element("li", element("u"), marker[1]))
    return Html(element("div", pieces, class_="divided") + element("ul", legend, class_="legend"))


def _grid(frame: _Frame, marks: list[float]) -> Html:
    path = "".join(f"M0 {frame.y(mark):.1f}H1000" for mark in marks)
    return element("path", d=path, class_="grid")


def _path(frame: _Frame, line: Line) -> list[Html]:
    thinned = thin(line.curve)
    points = [f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in zip(thinned.steps, thinned.values, strict=True)]
    drawn = [element("path", d="M" + "L".join(points), class_=line.style)] if len(points) > 1 else []
    if line.dots and len(points) <= 60:
        drawn.append(element("path", d="".join(f"M{point}h0" for point in points), class_=f"{line.style} dot"))
    return drawn


def _bands(frame: _Frame, lines: list[Line], spell: object) -> list[Html]:
    """Upright stretches, each with the numbers of the step in its middle as a hover title."""
    assert callable(spell)
    first = max(lines, key=lambda line: len(line.curve.steps)).curve
    count_bands = min(_BANDS, len(first.steps))
    picked = sorted({round(i * (len(first.steps) - 1) / max(1, count_bands - 1)) for i in range(count_bands)})
    known = [(line, dict(zip(line.curve.steps, line.curve.values, strict=True))) for line in lines]
    others = sorted(
        {s for line in lines for s in line.curve.steps if line.curve is not first and len(line.curve.steps) <= 60}
    )
    steps = sorted({first.steps[i] for i in picked} | set(others))
    bands = []
    for index, step in enumerate(steps):
        before, after = steps[max(index - 1, 0)], steps[min(index + 1, len(steps) - 1)]
        left, right = frame.x((before + step) / 2), frame.x((step + after) / 2)
        here = [(line.name, values[step]) for line, values in known if step in values]
        words = "\n".join([f"step {count(step)}", *(f"{name} {spell(value)}" for name, value in here)])
        dots = "".join(f"M{frame.x(step):.1f} {frame.y(value):.1f}h0" for _, value in here)
        area = element("rect", x=round(left, 1), width=round(right - left, 1), y=0, height=_SIZE, class_="band")
        bands.append(element("g", element("title", words), area, element("path", d=dots, class_="here")))
    return bands


def _legend(lines: list[Line]) -> Content:
    if len(lines) < 2:
        return None
    return element(
        "span", [element("span", element("i", class_=line.style), line.name) for line in lines], class_="keys"
    )


def _axis(marks: list[float]) -> list[tuple[float, str]]:
    """Marks with their spelling: all with the same decimals, or all as powers of ten if very small or big."""
    largest, smallest = max(map(abs, marks)), min((abs(mark) for mark in marks if mark), default=1.0)
    if smallest < 1e-3 or largest >= 1e6:
        return [(mark, _power(mark)) for mark in marks]
    decimals = max(len(f"{mark:.10g}".partition(".")[2]) for mark in marks)
    return [(mark, f"{mark:,.{decimals}f}") for mark in marks]


def _power(value: float) -> str:
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}" if value else "0"


def _label(text: str, *, top: float | None = None, left: float | None = None) -> Html:
    style = f"top:{top / 10:.2f}%" if top is not None else f"left:{(left or 0) / 10:.2f}%"
    return element("span", text, style=style)
