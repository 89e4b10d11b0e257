"""``metrics.jsonl``: one JSON object a line for every logged step and every evaluation, on disk at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.train.callbacks.base import Callback, Run, StepMetrics
from halftune.train.callbacks.window import Window, finite

log = get_logger(__name__)
NAME = "metrics.jsonl"


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; a last line that was cut off while being written ends them."""
    path = folder / NAME
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if isinstance(entry, dict):
                yield entry


class MetricsFile(Callback):
    """Appends to ``metrics.jsonl``. Where a run goes on from a checkpoint, lines after it are dropped first."""

    def __init__(self, every: int) -> None:
        self.window = Window(every)

    def on_start(self, run: Run) -> None:
        """Keeps the lines up to the restored step: those after it will be measured again."""
        path = run.folder / NAME
        if not run.is_main or not path.exists():
            return
        kept = [line for line in read_metrics(run.folder) if line.get("step", 0) <= run.step and run.step > 0]
        beside = path.with_suffix(".writing")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(beside, path)

    def on_step(self, run: Run, metrics: StepMetrics) -> None:
        """A line per ``logging_steps``, and one for the last step."""
        self._append(run, self.window.add(run, metrics))

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        """A line per evaluation."""
        numbers = {name: finite(value) for name, value in metrics.items()}
        self._append(run, {"step": run.step, "epoch": round(run.epoch, 6), **numbers, "time": round(time.time(), 3)})

    def on_save(self, run: Run, folder: Path) -> None:
        """The steps up to the checkpoint: a run that goes on from it begins a new line, and none is lost."""
        self._append(run, self.window.line(run))

    def on_end(self, run: Run, error: BaseException | None) -> None:
        """The steps that no line has told of yet."""
        try:
            self._append(run, self.window.line(run))
        except TrainingError as failure:  # the run is over; what ended it matters more
            log.warning("%s", failure)

    def _append(self, run: Run, line: dict[str, Any] | None) -> None:
        if line is None or not run.is_main:
            return
        try:
            with (run.folder / NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(
                f"cannot write metrics: {error.strerror}",
                where=str(run.folder / NAME),
                remedy="free space and run the same command again; checkpoints are intact",
            ) from error
