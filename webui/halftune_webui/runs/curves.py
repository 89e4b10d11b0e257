"""What a chart is sent: few points that keep every spike, gaps where there was no number, and a smoothed line."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from halftune_webui.runs.metrics import Metrics, Series

POINTS, SCALE = 1000, 200


def thinned(series: Series, points: int = POINTS) -> list[list[float | None]]:
    """``[step, value]`` pairs, at most ``points``: lowest and highest of each stretch, and every gap; None is NaN."""
    steps, values = np.frombuffer(series.steps), np.frombuffer(series.values)
    if len(steps) > points:
        kept = _extremes(values, points)
        steps, values = steps[kept], values[kept]
    return [[_whole(step), _rounded(value)] for step, value in zip(steps.tolist(), values.tolist(), strict=True)]


def scale(metrics: Metrics, points: int = SCALE) -> list[list[float | None]]:
    """``[step, tokens, seconds]`` at up to ``points`` steps: for charts over tokens or time instead of steps."""
    steps, tokens = np.frombuffer(metrics.tokens.steps), np.frombuffer(metrics.tokens.values)
    seconds = np.frombuffer(metrics.seconds.values)
    if not len(steps):
        return []
    kept = np.unique(np.linspace(0, len(steps) - 1, min(points, len(steps))).astype(int))
    rows = zip(steps[kept].tolist(), tokens[kept].tolist(), seconds[kept].tolist(), strict=True)
    return [[_whole(step), _rounded(count), _rounded(time)] for step, count, time in rows]


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


def smoothed(series: Series, points: int = POINTS) -> list[list[float | None]]:
    """A mean under a Gaussian window about a fortieth of the series wide, at most ``points`` points; gaps are left out.

    Empty where the series is too short for a smooth line to say more than its points.
    """
    steps, values = np.frombuffer(series.steps), np.frombuffer(series.values)
    there = np.isfinite(values)
    steps, values = steps[there], values[there]
    if len(steps) < 20:
        return []
    stretch = -(-len(steps) // points)
    if stretch > 1:  # a mean of equal stretches first
        starts = np.arange(0, len(steps), stretch)
        widths = np.diff(starts, append=len(steps))
        steps, values = np.add.reduceat(steps, starts) / widths, np.add.reduceat(values, starts) / widths
    spread = max(1.5, len(values) / 80)
    reach = math.ceil(3 * spread)
    window = np.exp(-0.5 * (np.arange(-reach, reach + 1) / spread) ** 2)
    weight = np.convolve(np.ones_like(values), window)[reach : reach + len(values)]
    fit = np.convolve(values, window)[reach : reach + len(values)] / weight
    return [[_whole(step), _rounded(value)] for step, value in zip(steps.tolist(), fit.tolist(), strict=True)]


def _whole(step: float) -> float:
    return int(step) if step == int(step) else round(step, 1)


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def chart(name: str, runs: list[tuple[str, Series]], *, smooth: bool) -> dict[str, Any]:
    """A chart as JSON: ``{"name", "lines": [{"run", "points", "smooth"}]}``; runs without a point are left out."""
    lines = [
        {"run": run, "points": thinned(series), "smooth": smoothed(series) if smooth else []}
        for run, series in runs
        if len(series.steps)
    ]
    return {"name": name, "lines": lines}
