"""``metrics.jsonl``: one JSON object a line for every logged step and every evaluation, in the file at once."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from halftune.core.atomic import sync, write_text
from halftune.core.files import open_file
from halftune.core.log import get_logger
from halftune.core.run_metrics import NAME, digest, read_metrics
from halftune.train.callback import Callback, Phase, StepMetrics
from halftune.train.state import TrainState
from halftune.train.window import Window, finite

log = get_logger(__name__)


class MetricsFile(Callback):
    """Appends to ``metrics.jsonl``. Where a run goes on from a checkpoint, the file is cut back to what it knew then.

    Lines that cannot be written (a full disk) are kept and tried again with the next one; training goes on.
    """

    watches = True

    def __init__(self, every: int) -> None:
        self.window = Window(every)
        self.written: int | None = None  # length of the file at the restored checkpoint, in bytes
        self.waiting: list[str] = []
        self.warned = False
        self.run: TrainState | None = None

    def state(self) -> dict[str, Any]:
        """Length and checksum of the file, what waits to be written, and the steps that no line has told of yet."""
        size, summed = 0, ""
        if self.run is not None:
            path = self.run.folder / NAME
            with suppress(OSError):  # no file: nothing has been written
                sync(path)
                size = path.stat().st_size
                summed = digest(self.run.folder, size)
        return {"bytes": size, "sha256": summed, "waiting": self.waiting, "window": self.window.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where the checkpoint was."""
        self.written, self.waiting = state["bytes"], list(state["waiting"])
        self.window.restore(state["window"])

    def on_start(self, run: TrainState) -> None:
        """Cuts the file back: what comes after the restored step will be measured again."""
        path = run.folder / NAME
        if not run.is_main:
            return
        self.run = run
        if not path.exists():
            return
        if run.step and self.written is not None and _continues(path, self.written, run.step):
            with open_file(path, "r+b") as file:
                file.truncate(self.written)
            return
        kept = [line for line in read_metrics(run.folder) if line.get("step", 0) <= run.step and run.step > 0]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """A line per ``logging_steps``, and one for the last step."""
        self._append(run, self.window.add(run, metrics))

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """A line per evaluation."""
        numbers = {name: finite(value) for name, value in metrics.items()}
        self._append(run, {"step": run.step, "epoch": round(run.epoch, 6), **numbers, "time": round(time.time(), 3)})

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """The last steps of a run that stops early: no checkpoint shall hold them back."""
        if phase == "saving" and run.stop:
            self._append(run, self.window.line(run))

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """The steps that no line has told of yet; a run that goes on from a checkpoint takes this line back."""
        self._append(run, self.window.line(run))
        if self.waiting:
            log.warning("%s lacks %d lines that could not be written", run.folder / NAME, len(self.waiting))

    def _append(self, run: TrainState, line: dict[str, Any] | None) -> None:
        if line is None or not run.is_main:
            return
        self.waiting.append(json.dumps(line) + "\n")
        try:
            _write(run.folder / NAME, "".join(self.waiting).encode())
        except OSError as error:
            if not self.warned:
                self.warned = True
                log.warning(
                    "cannot write %s: %s; training continues, the next write retries these lines",
                    run.folder / NAME,
                    error.strerror,
                )
        else:
            self.waiting = []


def _write(path: Path, data: bytes) -> None:
    """Appends all of ``data`` or nothing."""
    with open_file(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def _continues(path: Path, size: int, step: int) -> bool:
    """Whether the first ``size`` bytes of a file are what was there at ``step``: whole lines, none of a later step."""
    try:
        with open_file(path) as file:
            known = file.read(min(size, os.fstat(file.fileno()).st_size + 1))
    except OSError:
        return False
    if len(known) < size or (known and not known.endswith(b"\n")):
        return False
    try:
        return not known or json.loads(known.splitlines()[-1])["step"] <= step
    except (ValueError, LookupError, TypeError):
        return False
