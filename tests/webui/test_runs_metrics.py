"""Metrics are read on from where the last look ended, also over a resumed run's cut; thinning loses no spike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halftune.train.report.series import POINTS, Series, smoothed, thinned
from halftune_webui.runs.view import metrics as module
from halftune_webui.runs.view.metrics import Metrics


def line(step: int, **values: Any) -> str:
    entry = {"step": step, "loss": 1.0 / step, "learning_rate": 1e-3, "grad_norm": 2.0, "tokens": 100, "seconds": 0.5}
    return json.dumps({**entry, "memory_bytes": 10, **values}) + "\n"


def write(run: Path, *lines: str, mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(lines)


def test_only_what_is_new_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path)
    assert not metrics.update()
    write(tmp_path, line(1), line(2), json.dumps({"step": 2, "eval_loss": 0.7}) + "\n")
    assert metrics.update()
    parsed: list[bytes] = []
    real = json.loads
    monkeypatch.setattr(module.json, "loads", lambda text: parsed.append(text) or real(text))
    assert not metrics.update()
    third = line(3)
    write(tmp_path, third[:20])
    assert not metrics.update()  # a line that is being written is left for later
    write(tmp_path, third[20:])
    assert metrics.update()
    assert parsed == [third.encode().rstrip()]
    assert metrics.charts() == ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory"]
    assert list(metrics["loss"].steps) == [1, 2, 3]
    assert list(metrics["eval_loss"].values) == [0.7]
    assert list(metrics["tokens_per_second"].values) == [200.0] * 3


@pytest.mark.parametrize("again", [1, 3, 9])
def test_a_resumed_run_cuts_the_file_back(tmp_path: Path, again: int) -> None:
    write(tmp_path, *(line(step) for step in range(1, 7)))
    metrics = Metrics(tmp_path)
    metrics.update()
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:4]
    # truncated in place, and by the next look shorter than, as long as, or longer than before
    write(tmp_path, *kept, *(line(4 + number, loss=9.0) for number in range(1, again + 1)), mode="w")
    assert metrics.update()
    assert list(metrics["loss"].steps) == [1, 2, 3, 4, *range(5, 5 + again)]
    assert list(metrics["loss"].values)[4:] == [9.0] * again


def test_a_file_that_goes_and_comes_is_read_anew(tmp_path: Path) -> None:
    write(tmp_path, line(1), line(2))
    metrics = Metrics(tmp_path)
    metrics.update()
    (tmp_path / "metrics.jsonl").unlink()
    assert metrics.update()
    assert not len(metrics["loss"].steps)
    write(tmp_path, line(1), "{broken\n", '"text"\n', '{"loss": 1}\n', line(2))
    metrics.update()
    assert list(metrics["loss"].steps) == [1, 2]


def test_alarms(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    write(tmp_path, line(1), line(2, loss=0.0))
    metrics.update()
    assert metrics.alarms == []  # once may be a batch without a trained token
    write(tmp_path, line(3, loss=0.0), line(4, loss=None, grad_norm=None), line(5, grad_norm=None, skipped=1.0))
    metrics.update()
    found = {alarm.kind: (alarm.step, alarm.count) for alarm in metrics.alarms}
    expected = {"loss_zero": (2, 2), "loss_not_finite": (4, 1), "norm_not_finite": (4, 1), "skipped": (5, 1)}
    assert found == expected
    assert math.isnan(metrics["loss"].values[3])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=4000), st.randoms())
def test_thinning_keeps_ends_extremes_and_gaps(values: list[float], random: Any) -> None:
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(step, value)
    points = thinned(series, 100)
    assert len(points) <= max(100, min(len(values), 100))
    steps = [point[0] for point in points]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, len(values))
    finite = [value for value in values if math.isfinite(value)]
    shown = [value for _, value in points if value is not None]
    if finite:
        assert max(shown) == pytest.approx(max(finite), rel=1e-5)
        assert min(shown) == pytest.approx(min(finite), rel=1e-5)
    assert (None in [value for _, value in points]) == (len(finite) < len(values))


def test_a_chart_of_long_runs_is_small(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    for step in range(1, 100_001):
        metrics.take({"step": step, "loss": math.sin(step / 9000) + (5 if step == 77_777 else 0)})
    sent = metrics.line("a", "loss", smooth=True)
    assert sent["run"] == "a"
    assert len(sent["points"]) <= POINTS
    assert [77_777, pytest.approx(5 + math.sin(77_777 / 9000), rel=1e-5)] in sent["points"]
    smooth = sent["smooth"]
    assert len(smooth) <= POINTS
    inner = [point for point in smooth if point[0] < 70_000]
    assert max(abs(value - math.sin(step / 9000)) for step, value in inner) < 0.02


def test_the_methods_own_metrics_get_charts(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    counts = {
        "tokens": 9,
        "tokens_real": 8,
        "tokens_trained": 7,
        "seconds": 2.0,
        "time": 3.0,
        "epoch": 0.1,
        "skipped": 0,
    }
    metrics.take({"step": 1, "loss": 0.7, "rewards/margin": 0.1, "reward": 0.2, "kl": None, "note": "x", **counts})
    metrics.take({"step": 1, "eval_loss": 0.7, "eval_loss_code": 0.8, "eval_rewards/margin": 0.2})
    own = ["rewards/margin", "reward", "kl"]
    assert metrics.charts() == ["loss", "eval_loss", "tokens_per_second", "eval_loss_code", *own]


def test_a_short_series_is_not_smoothed() -> None:
    series = Series()
    for step in range(19):
        series.add(step, 1.0)
    assert smoothed(series) == []
