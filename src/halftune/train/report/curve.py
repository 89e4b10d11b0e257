"""Series of numbers over steps: read, smoothed, thinned, and the round numbers of an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_FINEST = 2000  # points of a smoothed curve


@dataclass(frozen=True)
class Curve:
    """Numbers over steps: ``steps[i]`` has ``values[i]``; steps rise, values are finite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)


def curve(lines: list[dict[str, Any]], name: str) -> Curve:
    """The finite numbers that lines of metrics hold under ``name``."""
    pairs = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    pairs = [(step, float(value)) for step, value in pairs if math.isfinite(value)]
    return Curve(tuple(step for step, _ in pairs), tuple(value for _, value in pairs))


def speed(lines: list[dict[str, Any]], name: str) -> Curve:
    """``name`` per second of step time."""
    timed = [line for line in lines if line.get("seconds") and isinstance(line.get(name), int | float)]
    return Curve(tuple(line["step"] for line in timed), tuple(line[name] / line["seconds"] for line in timed))


def smooth(raw: Curve) -> Curve:
    """A local linear fit under a Gaussian window about a thirtieth of the curve wide: no lag, no bias at the ends.

    Long curves are averaged over equal stretches first, so the answer may have fewer points.
    """
    if len(raw.steps) < 3:
        return raw
    steps, values = np.array(raw.steps, dtype=np.float64), np.array(raw.values)
    stretch = -(-len(steps) // _FINEST)
    if stretch > 1:
        starts = np.arange(0, len(steps), stretch)
        widths = np.diff(starts, append=len(steps))
        steps, values = np.add.reduceat(steps, starts) / widths, np.add.reduceat(values, starts) / widths
    spread = max(2.0, len(values) / 30)
    reach = int(4 * spread)
    offset = np.arange(-reach, reach + 1)
    window = np.exp(-0.5 * (offset / spread) ** 2)
    # at point i the data at i + d carry the weight window[d]; convolve turns its kernel round, hence the minus
    weight, first, second = (_over(np.ones_like(values), window * (-offset) ** power) for power in (0, 1, 2))
    total, tilted = _over(values, window), _over(values, window * -offset)
    fit = (second * total - first * tilted) / (second * weight - first**2)
    return Curve(tuple(round(float(step)) for step in steps), tuple(float(value) for value in fit))


def _over(values: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """``values`` convolved with ``kernel`` (of odd length), as long as ``values``."""
    reach = len(kernel) // 2
    return np.convolve(values, kernel)[reach : reach + len(values)]


def thin(dense: Curve, points: int = 800) -> Curve:
    """At most about ``points`` points: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(dense.steps) <= points:
        return dense
    width, kept = 2 * len(dense.steps) / points, {0, len(dense.steps) - 1}
    for bucket in range(points // 2):
        stretch = range(int(bucket * width), min(int((bucket + 1) * width), len(dense.steps)))
        if stretch:
            kept |= {min(stretch, key=dense.values.__getitem__), max(stretch, key=dense.values.__getitem__)}
    order = sorted(kept)
    return Curve(tuple(dense.steps[i] for i in order), tuple(dense.values[i] for i in order))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below ``low`` to at or above ``high``."""
    if high <= low:
        low, high = low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    raw = (high - low) / max(1, wanted - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    gap = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    return [round(i * gap, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from at or below ``low`` to at or above ``high``, both positive."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]
