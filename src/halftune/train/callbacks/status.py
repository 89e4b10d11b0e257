"""``status.json`` and the progress bar: phase, step and time left."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from halftune.core.atomic import write_text
from halftune.core.errors import HalftuneError
from halftune.core.files import read_text
from halftune.core.log import FILE_ONLY, get_logger
from halftune.core.processes.process import this_process
from halftune.core.quantities import clock, count, rate, significant, size
from halftune.core.status import NAME, StatusFile, read_status
from halftune.model.attention.register import current_guard
from halftune.train.callback import EVAL_SET, Callback, Phase, StepMetrics
from halftune.train.signals.interrupt import Interrupted
from halftune.train.state import TrainState
from halftune.train.window import Window, finite

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
            "step %s/%s · loss %s%s · lr %s · norm %s · %s · %s%s",
            count(run.step),
            count(run.total_steps),
            significant(line["loss"]),
            measured(line),
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
    """``step 100 · eval loss 1.234, code 1.345 (best so far)``, with the loss of each named evaluation set."""
    best = " (best so far)" if run.best is not None and run.best[0] == run.step else ""
    named = {name.removeprefix(EVAL_SET): value for name, value in metrics.items() if name.startswith(EVAL_SET)}
    sets = "".join(f", {name} {significant(value)}" for name, value in named.items())
    own = measured({name.removeprefix("eval_"): value for name, value in metrics.items()})
    return f"step {count(run.step)} · eval loss {significant(metrics['eval_loss'])}{sets}{own}{best}"


def measured(metrics: Mapping[str, Any]) -> str:
    """`` · reward 0.5`` where the method measures rewards, or `` · accuracy 0.75``; else empty."""
    shown = {"reward": "reward", "rewards/accuracies": "accuracy"}
    return "".join(
        f" · {shown[name]} {significant(metrics[name], 3)}" for name in shown if metrics.get(name) is not None
    )


class StatusLine(Callback):
    """Keeps the file up to date, at most twice a second while it trains. Comes last: its end is the run's."""

    watches = True

    def __init__(self) -> None:
        self.pace = Pace()
        self.file: StatusFile | None = None

    def on_start(self, run: TrainState) -> None:
        """Where the run stands: a checkpoint may have been restored."""
        if run.is_main:
            self.file = StatusFile(run.folder / NAME)
            self._tell(run)

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Names the phase."""
        self._tell(run, phase=phase)

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """The numbers of the step."""
        left = self.pace.left(run.step, run.total_steps, time.monotonic())
        self._tell(run, urgent=False, loss=finite(metrics.loss), seconds_left=left)

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """How it ended."""
        if self.file is None and run.is_main:  # before its start: a checkpoint could not be read
            self.file = StatusFile(run.folder / NAME)
        self._tell(run, seconds_left=None, **ending(error))

    def _tell(self, run: TrainState, *, urgent: bool = True, **changes: Any) -> None:
        if self.file is not None:
            where = {"step": run.step, "total": run.total_steps, "epoch": round(run.epoch, 6)}
            self.file.tell(urgent=urgent, casts=current_guard().casts, **where, **changes)


def ending(error: BaseException | None) -> dict[str, Any]:
    """The last fields of a status, by what ended the run."""
    if error is None:
        return {"state": "finished", "phase": "finished", "error": "", "code": ""}
    stopped = isinstance(error, Interrupted | KeyboardInterrupt)
    known = str(error) if type(error).__module__.startswith("halftune") else f"{type(error).__name__}: {error}"
    said, code = known.strip(": ") or type(error).__name__, error.code if isinstance(error, HalftuneError) else ""
    return {"state": "stopped" if stopped else "failed", "error": said, "code": code}


@contextmanager
def before_training(folder: Path) -> Iterator[Callable[[Phase], None]]:
    """Around what comes before the first step: yields what is told of each phase.

    An error is written down where nothing was in the folder. Where a run was, it stays what it was: a start that is
    refused is no part of it.
    """
    if not this_process().main:
        yield lambda _: None
        return
    file = StatusFile(folder / NAME)
    before = _of_a_run(folder)
    try:
        yield lambda phase: file.tell(phase=phase)
    except BaseException as error:
        if before is None:
            file.tell(**ending(error))
        else:
            with suppress(OSError):
                write_text(folder / NAME, before)
        raise


def _of_a_run(folder: Path) -> str | None:
    """The status that a run left in its folder; None where there is none, or one of a run that never took a step."""
    try:
        text = read_text(folder / NAME)
        status = read_status(folder / NAME)
    except (OSError, ValueError):
        return None
    return text if status is not None and (status.step or status.state == "finished") else None
