"""``status.json``: the state of a halftune process, for the web UI and scripts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from halftune.core.atomic import is_full
from halftune.core.errors import HalftuneError
from halftune.core.files import open_file, read_json
from halftune.core.log import get_logger
from halftune.core.processes.process import identity

log = get_logger(__name__)
NAME = "status.json"
STARTED = ".started"  # subfolder of a run folder: how a program started the run
State = Literal["running", "finished", "stopped", "failed"]
_BLOCK = 4096  # file system block size; overwriting within a block needs no space
_LARGEST = 2**53  # upper bound of counts and times


@dataclass(frozen=True)
class Status:
    """The status of a process.

    Attributes:
        state: ``running`` until the last update. If it is ``running`` and the process is gone, it was killed.
        phase: current activity: ``tokenising | compiling | loading | training | evaluating | saving | finished`` in
            training.
        step, total: steps done and total steps; total is 0 if unknown.
        epoch: epochs done, as a fraction.
        loss: of the last step; None before the first step, and if it is not finite.
        seconds_left: estimated from the pace so far; None if unknown.
        casts: attention calls whose operands were not in the planned dtype, since this start.
        error, code: message and code of the error that ended it; empty if there was none.
        pid, process, host: of the writer; ``process`` is :func:`halftune.core.processes.process.identity`.
        started, updated: Unix times of the process's start and of this update.
    """

    state: State = "running"
    phase: str = ""
    step: int = 0
    total: int = 0
    epoch: float = 0.0
    loss: float | None = None
    seconds_left: float | None = None
    casts: int = 0
    error: str = ""
    code: str = ""
    pid: int = 0
    process: str = ""
    host: str = ""
    started: float = 0.0
    updated: float = 0.0


class StatusFile:
    """Writes status updates atomically; write errors are ignored.

    On a full disk, urgent updates overwrite the existing file in place.

    Args:
        path: the file.
        pause: minimum seconds between updates that are not urgent.
    """

    def __init__(self, path: Path, pause: float = 0.5) -> None:
        self.path, self.pause = path, pause
        self._next = -float("inf")
        pid = os.getpid()
        self._values: dict[str, Any] = asdict(
            Status(pid=pid, process=identity(pid) or "", host=socket.gethostname(), started=time.time())
        )

    def tell(self, *, urgent: bool = True, **changes: Any) -> None:
        """Change fields of the status and write it; updates that are not urgent wait for the pause."""
        self._values |= changes
        now = time.monotonic()
        if not urgent and now < self._next:
            return
        self._next = now + self.pause
        beside = self.path.with_name(f".{self.path.name}.writing")
        try:
            with open_file(beside, "wb") as file:
                file.write(self._text().encode())
            os.replace(beside, self.path)
        except OSError as error:
            log.debug("cannot write %s: %s", self.path, error.strerror)
            with suppress(OSError):
                beside.unlink(missing_ok=True)
                if urgent and is_full(error):
                    self._write_over()

    def _text(self, most: int | None = None) -> str:
        shown = {**self._values, "error": self._values["error"][:most], "updated": round(time.time(), 3)}
        return json.dumps(shown)

    def _write_over(self) -> None:
        """Overwrite the existing file in place, within its block, if the disk is full."""
        with open_file(self.path, "r+b", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            most = len(self._values["error"])
            while len(text := self._text(most).encode().ljust(before)) > max(_BLOCK, before) and most:
                most //= 2
            file.write(text)  # one write, for concurrent readers


@contextmanager
def reported(file: StatusFile) -> Iterator[StatusFile]:
    """Report a block's state: running, then finished, stopped or failed with its error."""
    file.tell(phase="starting")
    try:
        yield file
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        code = error.code if isinstance(error, HalftuneError) else ""
        file.tell(state="stopped" if stopped else "failed", error=str(error) or type(error).__name__, code=code)
        raise
    file.tell(state="finished", phase="finished")


def finish(path: Path) -> None:
    """Mark a status as finished if the process was killed after its work was done."""
    try:
        status = read_status(path)
    except (OSError, ValueError):
        return
    if status is not None and status.state != "finished":
        last = {"state": "finished", "phase": "finished", "error": "", "code": "", "seconds_left": None}
        StatusFile(path).tell(**asdict(status) | last)


def read_status(path: Path) -> Status | None:
    """Read a status file; None if it does not exist.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a valid status.
    """
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name} is not a valid status: {error}") from error
    if not isinstance(values, dict) or not {"state", "phase", "pid"} <= values.keys():
        raise ValueError(f"{path.name} is not a valid status")
    known = {field.name: values[field.name] for field in fields(Status) if field.name in values}
    if odd := [name for name, value in known.items() if not _fits(name, value)]:
        raise ValueError(f"{path.name} is not a valid status: invalid {', '.join(odd)}")
    return Status(**known)


def _fits(name: str, value: Any) -> bool:
    """Whether a field's value is valid; only the loss may be non-finite."""
    usual = vars(Status)[name]
    if name == "state":
        return value in get_args(State)
    if isinstance(usual, str) or value is None:
        return isinstance(value, str) or usual is None
    if isinstance(value, bool) or not isinstance(value, int if isinstance(usual, int) else int | float):
        return False
    return abs(value) <= _LARGEST or (name == "loss" and isinstance(value, float))
