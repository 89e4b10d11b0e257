"""``status.json``: the phase, the step and the time left, for whoever watches from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.errors import HalftuneError
from halftune.core.files import read_text
from halftune.core.launcher import this_process
from halftune.core.status import NAME, StatusFile, read_status
from halftune.model.patch import current_guard
from halftune.train.callbacks.base import Callback, Phase, StepMetrics
from halftune.train.callbacks.progress import Pace
from halftune.train.callbacks.window import finite
from halftune.train.interrupt import Interrupted
from halftune.train.state import TrainState


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
