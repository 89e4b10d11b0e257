"""What the external loggers share: a line per window, and a logger that fails is switched off, not the training."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halftune.core.log import get_logger
from halftune.train.callback import Callback, StepMetrics
from halftune.train.state import TrainState
from halftune.train.window import Window

log = get_logger(__name__)

# metrics.jsonl's names → names in a logger's tree
NAMES = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "memory_bytes": "train/memory_bytes",
    "eval_loss": "eval/loss",
    "eval_seconds": "eval/seconds",
}
_SPEEDS = {"tokens": "speed/tokens", "tokens_real": "speed/tokens_real", "tokens_trained": "speed/tokens_trained"}
_OWN = {*NAMES, *_SPEEDS, "step", "seconds", "time"}


class Logger(Callback):
    """Sends lines to somewhere else. A subclass opens, sends and closes; any failure ends the logger with a warning."""

    watches = True
    name = ""
    failures: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError)

    def __init__(self, every: int) -> None:
        self.window = Window(every)
        self.on = False
        self.lost: int | None = None  # the step at which it failed

    def state(self) -> dict[str, Any]:
        """The steps that have not been sent yet."""
        return {"window": self.window.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where the checkpoint was."""
        self.window.restore(state["window"])

    def open(self, run: TrainState) -> None:
        """Starts logging a run."""
        raise NotImplementedError

    def place(self, run: TrainState) -> Path:
        """The run folder, where the package writes to a folder of its own name.

        Raises:
            OSError: that folder is a symbolic link.
        """
        if (own := run.folder / self.name).is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link", str(own))
        return run.folder

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """Logs numbers under their names in the logger's tree."""
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """Ends the run in the logger."""
        raise NotImplementedError

    def on_start(self, run: TrainState) -> None:
        """Opens the logger on the main process.

        Raises:
            MissingPackageError: its package is not installed.
        """
        self.on = run.is_main
        self._try(run, self.open, run)

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Sends a line per ``logging_steps``."""
        if self.on and (line := self.window.add(run, metrics)):
            self._try(run, self.send, run.step, tree(line))

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """Sends the evaluation's numbers."""
        self._try(run, self.send, run.step, tree(metrics))

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Sends what is left and closes."""
        if self.on and (line := self.window.line(run)):
            self._try(run, self.send, run.step, tree(line))
        self._try(run, self.close, error is not None)
        if self.lost is not None:
            log.warning("%s has nothing of what came after step %d", self.name, self.lost)

    def _try(self, run: TrainState, action: Callable[..., None], *details: Any) -> None:
        if not self.on:
            return
        try:
            action(*details)
        except self.failures as error:
            self.on, self.lost = False, run.step
            log.warning("%s is off for the rest of the run: %s: %s", self.name, type(error).__name__, error)


def tree(line: dict[str, Any]) -> dict[str, float]:
    """A line's finite numbers under the names that a logger shows; tokens become tokens per second."""
    numbers = {NAMES[name]: value for name, value in line.items() if name in NAMES}
    if line.get("seconds"):
        numbers |= {shown: line[name] / line["seconds"] for name, shown in _SPEEDS.items() if name in line}
    for name in line.keys() - _OWN:
        numbers[f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"] = line[name]
    return {name: float(value) for name, value in numbers.items() if value is not None}
