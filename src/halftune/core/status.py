"""``status.json``: what a process of halftune is doing, for whoever watches from outside (the web board, a script)."""

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
from halftune.core.files import open_file
from halftune.core.log import get_logger
from halftune.core.process import identity

log = get_logger(__name__)
NAME = "status.json"
STARTED = ".started"  # a folder in a run folder: how the run was started, where a program did
State = Literal["running", "finished", "stopped", "failed"]
_MOST = 4 * 2**20  # bytes of a JSON file that is read whole
_BLOCK = 4096  # bytes in which file systems give space away; writing within them needs no more
_LARGEST = 2**53  # no count, and no moment, is beyond


@dataclass(frozen=True)
class Status:
    """One look at a process.

    Attributes:
        state: ``running`` until its last word. A ``running`` whose process is gone was killed.
        phase: what it is doing: ``tokenising | compiling | loading | training | evaluating | saving | finished`` in
            training.
        step, total: steps done and steps in all; 0 in all where that is not known.
        epoch: epochs done, as a fraction.
        loss: of the last step; None before it, and where it is not finite.
        seconds_left: at the pace so far; None where none is known.
        casts: attention calls whose operands had left the planned dtype, in this sitting.
        error: the sentence that ended it; empty where nothing did.
        pid, process, host: who writes this; ``process`` is :func:`halftune.core.process.identity`.
        started, updated: Unix time of the process's begin, and of this look.
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
    pid: int = 0
    process: str = ""
    host: str = ""
    started: float = 0.0
    updated: float = 0.0


class StatusFile:
    """Writes a status again and again. The file is whole at every moment; where it cannot be written, nothing stops.

    On a full disk what is urgent, such as how it ended, is still told.

    Args:
        path: the file.
        pause: least seconds between two writes that are not urgent.
    """

    def __init__(self, path: Path, pause: float = 0.5) -> None:
        self.path, self.pause = path, pause
        self._next = -float("inf")
        pid = os.getpid()
        self._values: dict[str, Any] = asdict(
            Status(pid=pid, process=identity(pid) or "", host=socket.gethostname(), started=time.time())
        )

    def tell(self, *, urgent: bool = True, **changes: Any) -> None:
        """Changes fields of the status and writes it; what is not urgent is written when the pause is over."""
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
        """Where no new file fits on the disk: into the one that is there, whose block can hold a little more."""
        with open_file(self.path, "r+b", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            most = len(self._values["error"])
            while len(text := self._text(most).encode().ljust(before)) > max(_BLOCK, before) and most:
                most //= 2
            file.write(text)  # in one piece, for whoever reads at this moment


@contextmanager
def told(file: StatusFile) -> Iterator[StatusFile]:
    """Around a whole piece of work: the file says that it runs, then that it is finished, or what went wrong."""
    file.tell(phase="starting")
    try:
        yield file
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        file.tell(state="stopped" if stopped else "failed", error=str(error) or type(error).__name__)
        raise
    file.tell(state="finished", phase="finished")


def finish(path: Path) -> None:
    """Marks a status as finished, where the work was and its process was gone before it could say so."""
    try:
        status = read_status(path)
    except (OSError, ValueError):
        return
    if status is not None and status.state != "finished":
        last = {"state": "finished", "phase": "finished", "error": "", "seconds_left": None}
        StatusFile(path).tell(**asdict(status) | last)


def read_status(path: Path) -> Status | None:
    """The status in a file; None where there is none.

    Raises:
        OSError: it is there and cannot be read.
        ValueError: it is no status.
    """
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path.name} is no status: {error}") from error
    if not isinstance(values, dict) or not {"state", "phase", "pid"} <= values.keys():
        raise ValueError(f"{path.name} is no status")
    known = {field.name: values[field.name] for field in fields(Status) if field.name in values}
    if odd := [name for name, value in known.items() if not _fits(name, value)]:
        raise ValueError(f"{path.name} is no status: {', '.join(odd)} cannot be")
    return Status(**known)


def _fits(name: str, value: Any) -> bool:
    """Whether a field may have a value that came from a file; only the loss may be no finite number."""
    usual = vars(Status)[name]
    if name == "state":
        return value in get_args(State)
    if isinstance(usual, str) or value is None:
        return isinstance(value, str) or usual is None
    if isinstance(value, bool) or not isinstance(value, int if isinstance(usual, int) else int | float):
        return False
    return abs(value) <= _LARGEST or (name == "loss" and isinstance(value, float))


def read_json(path: Path, most: int = _MOST, *, root: Path | None = None) -> Any:
    """What a JSON file holds that somebody else may have written: no pipe is waited for, and nothing huge is read.

    Args:
        path: the file.
        most: bytes that it may have.
        root: as in :func:`halftune.core.files.open_file`.

    Raises:
        OSError: it is not there, is no regular file, is a link, or cannot be read.
        ValueError: it is larger than ``most`` bytes, or is no JSON.
    """
    with open_file(path, root=root) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes")
        data = file.read(most + 1)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
