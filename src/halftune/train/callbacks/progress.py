"""How far the run is: a live bar on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from halftune.core.log import FILE_ONLY, get_logger
from halftune.train.callbacks.base import Callback, Phase, StepMetrics
from halftune.train.callbacks.window import Window
from halftune.train.quantities import clock, count, rate, significant, size
from halftune.train.state import TrainState

log = get_logger(__name__)
_RECENT = 20  # steps that a speed on the bar is measured over


class Pace:
    """Time left, from the wall time of all steps but the first, which warms up (evaluation and saving included)."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def left(self, step: int, total: int, now: float) -> float | None:
        """Seconds left after ``step`` at the time ``now``; None after the first step."""
        if self.first is None:
            self.first = (step, now)
        done = step - self.first[0]
        return (now - self.first[1]) / done * (total - step) if done else None


def speeds(tokens: float, real: float, trained: float, seconds: float) -> str:
    """Tokens per second three ways: all that are fed, without padding, those that carry a label."""
    fed, full, labelled = (count(number / seconds) if seconds else "–" for number in (tokens, real, trained))
    return f"tok/s {fed} all, {full} real, {labelled} trained"


class _Bar(Progress):
    """The bar, and under it a line of numbers."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.numbers:
            yield Text(self.numbers, style="dim", overflow="ellipsis", no_wrap=True)


class ProgressBar(Callback):
    """The live bar. Log messages appear above it."""

    watches = True

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.pace, self.recent = Pace(), deque[StepMetrics](maxlen=_RECENT)
        self.bar: _Bar | None = None
        self.redirected: list[tuple[logging.StreamHandler, Any]] = []

    def on_start(self, run: TrainState) -> None:
        """Shows the bar on the main process."""
        if not run.is_main:
            return
        self.bar = _Bar(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )
        self.task = self.bar.add_task("starting", total=run.total_steps, completed=run.step, left="")
        before = sys.stderr
        self.bar.start()
        # The console's log handlers hold the terminal itself; through rich's stand-in they write above the bar.
        for handler in logging.getLogger("halftune").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                self.redirected.append((handler, handler.setStream(sys.stderr)))

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Names the phase in front of the bar."""
        if self.bar is not None:
            self.bar.update(self.task, description=phase)

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Moves the bar on."""
        if self.bar is None:
            return
        self.recent.append(metrics)
        left = self.pace.left(run.step, run.total_steps, time.monotonic())
        spent = sum(step.seconds for step in self.recent)
        columns = [sum(getattr(m, name) for m in self.recent) for name in ("tokens", "tokens_real", "tokens_trained")]
        self.bar.numbers = " · ".join(
            (
                f"loss {significant(metrics.loss)}",
                f"lr {rate(metrics.learning_rate)}",
                f"norm {significant(metrics.grad_norm, 3)}",
                speeds(columns[0], columns[1], columns[2], spent),
                size(metrics.memory_bytes),
            )
        )
        self.bar.update(self.task, completed=run.step, left=f"ETA {clock(left)}" if left else "")

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Leaves a line above the bar."""
        if self.bar is not None:
            self.bar.console.print(evaluation_line(run, metrics), highlight=False)

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Takes the bar down; it stays visible as it was."""
        if self.bar is None:
            return
        bar, self.bar = self.bar, None
        try:
            if error is not None:
                bar.update(self.task, description="stopped", left="")
            bar.stop()
        finally:  # a terminal that was closed takes no last word
            for handler, stream in self.redirected:
                handler.setStream(stream)


class ProgressLines(Callback):
    """Plain lines for files and pipes: at logged steps, at most one in 2 seconds, later one a minute.

    Args:
        every: steps of a line.
        shown: on the console, too; else in the run's log only.
    """

    watches = True

    def __init__(self, every: int, *, shown: bool = True) -> None:
        self.window, self.pace = Window(every), Pace()
        self.extra = None if shown else FILE_ONLY
        self.started = self.last = -float("inf")

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Logs a line where one is due."""
        now = time.monotonic()
        left = self.pace.left(run.step, run.total_steps, now)
        if self.started < 0:
            self.started = now
        line = self.window.add(run, metrics)
        pause = min(60.0, max(2.0, (now - self.started) / 50))
        if not run.is_main or line is None or (now - self.last < pause and run.step < run.total_steps):
            return
        self.last = now
        eta = "" if left is None or run.step == run.total_steps else f" · ETA {clock(left)}"
        log.info(
            "step %s/%s · loss %s · lr %s · norm %s · %s · %s%s",
            count(run.step),
            count(run.total_steps),
            significant(line["loss"]),
            rate(line["learning_rate"]),
            significant(line["grad_norm"], 3),
            speeds(line["tokens"], line["tokens_real"], line["tokens_trained"], line["seconds"]),
            size(line["memory_bytes"]),
            eta,
            extra=self.extra,
        )

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Logs the evaluation's loss."""
        if run.is_main:
            log.info(evaluation_line(run, metrics), extra=self.extra)


def evaluation_line(run: TrainState, metrics: dict[str, float]) -> str:
    """``step 100 · eval loss 1.234 (best so far)``."""
    best = " (best so far)" if run.best is not None and run.best[0] == run.step else ""
    return f"step {count(run.step)} · eval loss {significant(metrics['eval_loss'])}{best}"
