"""What a run folder says about its run, read once; its metrics as series, drawn as the report's curves."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup

from halftune.core.files import MOST_JSON, read_json, read_text
from halftune.core.packaged import read_written
from halftune.core.run_metrics import read_metrics
from halftune.core.templates import render
from halftune.train.callback import EVAL_SET

HERE = "halftune.train.report"  # whose templates and styles make the page
# chart → line → series
_CHARTS = {
    "loss": {"training": "loss", "evaluation": "eval_loss"},
    "learning_rate": {"training": "learning_rate"},
    "grad_norm": {"training": "grad_norm"},
    "tokens_per_second": {
        "training": "tokens_per_second",
        "not padding": "tokens_real_per_second",
        "trained": "tokens_trained_per_second",
    },
    "loss_scale": {"training": "loss_scale"},
}
_WORDS = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "loss_scale": "Loss scale",
    "raw": "every step",
    "smooth": "smoothed",
    "log": "logarithmic loss",
    "all": "Show all steps",
    "step": "step",
    "over": "over",
    "axes": {"step": "steps", "tokens": "tokens", "time": "time"},
    "save": "Save as",
    "odd": "not a number",
    "nothing": "no numbers in this stretch",
    "hint": "Drag over a curve to zoom in, double-click to see all of it again.",
}
POINTS, SCALE = 1000, 200
_MOST = 64  # series; metrics of a run folder may be anybody's
_COLUMNS = ("eval_loss", "loss", "learning_rate", "grad_norm", "loss_scale")
# Columns that are drawn in another way, or not at all; all others are the method's own metrics.
_COUNTS = ("step", "epoch", "tokens", "tokens_real", "tokens_trained", "seconds", "memory_bytes", "time", "skipped")
_SPEEDS = ("tokens", "tokens_real", "tokens_trained")
Points = list[list[float | None]]


@dataclass(frozen=True)
class Record:
    """A run, from its folder.

    Attributes:
        folder: the run folder.
        training, evaluations: lines of ``metrics.jsonl``.
        plan, environment, data, dtypes, guard, profile: the JSON files of those names.
        samples: rows of ``samples.json``.
        rollouts: prompts of ``rollouts.json``.
        config: ``resolved.yaml`` as values; ``config_text`` as text, with the origin of each value.
        unreadable: files that are there and cannot be read.
    """

    folder: Path
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    plan: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any]
    dtypes: dict[str, Any]
    guard: dict[str, Any]
    profile: dict[str, Any]
    samples: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    unreadable: list[str] = field(default_factory=list)

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.setting("logging", "run_name") or self.folder.resolve().name


def _values(folder: Path, name: str, *, unreadable: list[str]) -> dict[str, Any]:
    """The values of a JSON file, if it exists; its name is added to ``unreadable`` if it does not have an object."""
    if not (folder / name).exists():
        return {}
    with suppress(OSError, ValueError):
        if isinstance(values := read_json(folder / name, MOST_JSON), dict):
            return values
    unreadable.append(name)
    return {}


def read(folder: Path) -> Record:
    """Reads a run folder, of a run in any state."""
    unreadable: list[str] = []
    values = partial(_values, folder, unreadable=unreadable)
    path = folder / "resolved.yaml"
    text, config = "", {}
    try:
        text = read_text(path) if path.exists() else ""
        config = read_written(text) or {}
    except (OSError, ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError):
        unreadable.append(path.name)  # yaml reads `!!bool x` as a missing key
    lines = list(read_metrics(folder))
    return Record(
        folder=folder,
        training=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if "eval_loss" in line],
        plan=values("plan.json"),
        environment=values("environment.json"),
        data=values("data_report.json"),
        dtypes=values("dtypes.json"),
        guard=values("guard.json"),
        profile=values("profile.json"),
        samples=values("samples.json").get("samples", []),
        rollouts=values("rollouts.json").get("rollouts", []),
        config=config if isinstance(config, dict) else {},
        config_text=text,
        unreadable=unreadable,
    )


def curves(record: Record) -> Markup:
    """The section of charts."""
    found = Curves()
    for line in (*record.training, *record.evaluations):
        found.take(line)
    own = found.own()
    every = _CHARTS | {name: {"training": name, "evaluation": f"eval_{name}"} for name in own}
    charts = []
    every["loss"] = every["loss"] | found.eval_sets()
    for name, lines in every.items():
        wide = name == "loss"
        drawn = [found.line(line, series, smooth=wide) for line, series in lines.items() if found[series]]
        charts += [{"name": name, "lines": drawn, "wide": wide}] if drawn else []
    if not charts:
        return Markup()
    drawn = itertools.chain.from_iterable(chart["lines"] for chart in charts)
    names = list(dict.fromkeys(line["run"] for line in drawn))
    value = {"runs": names, "charts": charts, "scales": dict.fromkeys(names, found.scale())}
    words = _WORDS | ({"loss": "Loss"} if own else {})
    data = json.dumps({"words": json.dumps(words), "value": json.dumps(value)}).replace("<", "\\u003c")
    return render(HERE, "curves", data=Markup(data), script=Markup(script()))


def chart_script() -> str:
    """The script that draws charts: the body of a function of ``element``, ``props`` and ``watch``."""
    return files(HERE).joinpath("charts.js").read_text(encoding="utf-8")


@cache
def script() -> str:
    """The script of the page, the same in every report."""
    return (
        f"((element, props, watch) => {{\n{chart_script()}}})(document.getElementById('charts'), "
        "JSON.parse(document.getElementById('series').textContent), () => {});"
    )


def script_source() -> str:
    """The script as a Content-Security-Policy names it: a page that shows a report lets no other script run."""
    return f"'sha256-{b64encode(sha256(script().encode()).digest()).decode()}'"


@dataclass
class Series:
    """Numbers over steps: ``steps[i]`` has ``values[i]``; NaN where the run had no finite number."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: Any) -> None:
        """Adds a point; what is no number becomes NaN."""
        self.steps.append(step)
        self.values.append(float(value) if is_number(value) else math.nan)

    def __bool__(self) -> bool:
        return bool(self.steps)


def is_number(value: Any) -> bool:
    """Whether a value of a JSON line is a finite number below 1e300."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


class Curves:
    """The series of one run.

    Attributes:
        series: by name: the columns of ``metrics.jsonl``, ``tokens…_per_second``, and ``memory`` in GiB.
        tokens, seconds: over the same steps as the loss: tokens fed, and seconds of training, since the first step.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.tokens, self.seconds = Series(), Series()

    def __getitem__(self, name: str) -> Series:
        """The series of a name; an empty one where the run has none."""
        return self.series.get(name) or Series()

    def own(self) -> list[str]:
        """Names of the method's own metrics, such as ``rewards/margins`` and ``kl``."""
        drawn = (*_COLUMNS, "memory", *(f"{name}_per_second" for name in _SPEEDS))
        return [name for name in self.series if name not in drawn and not name.startswith("eval_")]

    def eval_sets(self) -> dict[str, str]:
        """The losses of named evaluation sets: label → series, such as ``eval_loss_code``."""
        return {f"evaluation {name.removeprefix(EVAL_SET)}": name for name in self.series if name.startswith(EVAL_SET)}

    def _known(self, name: str) -> bool:
        return name in _COLUMNS or name in self.series or name.startswith(EVAL_SET)

    def take(self, line: dict[str, Any]) -> None:
        """Adds a line of ``metrics.jsonl``; one without a step is left out."""
        if not is_number(line.get("step")):
            return
        step = float(line["step"])
        for name, value in line.items():
            if self._known(name) or (name not in _COUNTS and (value is None or is_number(value))):
                self._add(name, step, value)
        if "loss" in line:
            self._take_step(step, line)

    def _take_step(self, step: float, line: dict[str, Any]) -> None:
        """Totals and speeds of a line of training."""
        numbers = {name: value for name, value in line.items() if is_number(value)}
        for name, total in (("tokens", self.tokens), ("seconds", self.seconds)):
            total.add(step, (total.values[-1] if total else 0) + numbers.get(name, 0))
        if "memory_bytes" in numbers:
            self._add("memory", step, numbers["memory_bytes"] / 2**30)
        if numbers.get("seconds", 0) > 0:
            for name in filter(numbers.__contains__, _SPEEDS):
                self._add(f"{name}_per_second", step, numbers[name] / numbers["seconds"])

    def _add(self, name: str, step: float, value: Any) -> None:
        if name in self.series or len(self.series) < _MOST:
            self.series.setdefault(name, Series()).add(step, value)

    def line(self, run: str, name: str, *, smooth: bool) -> dict[str, Any]:
        """A series as ``charts.js`` draws it: ``{"run", "points", "smooth"}``, where ``run`` names the line."""
        return {"run": run, "points": thinned(self[name]), "smooth": smoothed(self[name]) if smooth else []}

    def scale(self, points: int = SCALE) -> Points:
        """``[step, tokens, seconds]`` at up to ``points`` steps: for charts over tokens or time instead of steps."""
        steps, tokens = np.frombuffer(self.tokens.steps), np.frombuffer(self.tokens.values)
        seconds = np.frombuffer(self.seconds.values)
        if not len(steps):
            return []
        kept = np.unique(np.linspace(0, len(steps) - 1, min(points, len(steps))).astype(int))
        rows = zip(steps[kept].tolist(), tokens[kept].tolist(), seconds[kept].tolist(), strict=True)
        return [[_whole(step), _rounded(count), _rounded(time)] for step, count, time in rows]


def thinned(series: Series, points: int = POINTS) -> Points:
    """``[step, value]`` pairs, at most ``points``: lowest and highest of each stretch, and every gap; None is NaN."""
    steps, values = np.frombuffer(series.steps), np.frombuffer(series.values)
    if len(steps) > points:
        kept = _extremes(values, points)
        steps, values = steps[kept], values[kept]
    return _pairs(steps, values)


def _extremes(values: np.ndarray, points: int) -> np.ndarray:
    """Indices of the first and last value, and of the lowest, highest and first missing one of each stretch."""
    edges = np.linspace(0, len(values), max(2, (points - 2) // 3 + 1)).astype(int)
    kept = {0, len(values) - 1}
    for left, right in itertools.pairwise(edges.tolist()):
        stretch = values[left:right]
        gaps = np.flatnonzero(~np.isfinite(stretch))
        if len(gaps):
            kept.add(int(left + gaps[0]))
        if len(gaps) < len(stretch):
            kept |= {int(left + np.nanargmin(stretch)), int(left + np.nanargmax(stretch))}
    return np.array(sorted(kept))


def smoothed(series: Series, points: int = POINTS) -> Points:
    """A local linear fit under a Gaussian window about a fortieth of the series wide: no lag, no bias at the ends.

    At most ``points`` points: long series are averaged over equal stretches first. Gaps are left out. Empty where the
    series is too short for a smooth line to say more than its points.
    """
    steps, values = np.frombuffer(series.steps), np.frombuffer(series.values)
    there = np.isfinite(values)
    steps, values = steps[there], values[there]
    if len(steps) < 20:
        return []
    stretch = -(-len(steps) // points)
    if stretch > 1:
        starts = np.arange(0, len(steps), stretch)
        widths = np.diff(starts, append=len(steps))
        steps, values = np.add.reduceat(steps, starts) / widths, np.add.reduceat(values, starts) / widths
    spread = max(2.0, len(values) / 80)
    reach = math.ceil(4 * spread)
    offset = np.arange(-reach, reach + 1)
    window = np.exp(-0.5 * (offset / spread) ** 2)

    def over(numbers: np.ndarray, power: int) -> np.ndarray:
        """At each point i the sum of ``numbers[i + d] · window[d] · d^power``; convolve turns its kernel round."""
        return np.convolve(numbers, window * (-offset) ** power)[reach : reach + len(numbers)]

    weight, first, second = (over(np.ones_like(values), power) for power in (0, 1, 2))
    fit = (second * over(values, 0) - first * over(values, 1)) / (second * weight - first**2)
    return _pairs(steps, fit)


def _pairs(steps: np.ndarray, values: np.ndarray) -> Points:
    return [[_whole(step), _rounded(value)] for step, value in zip(steps.tolist(), values.tolist(), strict=True)]


def _whole(step: float) -> float:
    return int(step) if step == int(step) else round(step, 1)


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
