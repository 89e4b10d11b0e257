"""What the web UI notes of a process that it starts: a folder ``.started`` in the folder of the run."""

from __future__ import annotations

import errno
import json
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.files import read_json
from halftune.core.processes.process import identity
from halftune.core.status import STARTED

CONFIG, CONSOLE, ANSWER = "config.yaml", "console.log", "answer.json"
_JOB, _PROCESS, _EXIT, _STOP = "job.json", "process.json", "exit.json", "stop.json"


@dataclass(frozen=True)
class Process:
    """A process by number and :func:`halftune.core.processes.process.identity`, and the machine that it runs on."""

    pid: int
    process: str
    host: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number on this machine now."""
        return cls(pid, identity(pid) or "", socket.gethostname())

    @property
    def alive(self) -> bool:
        """Whether it still runs, here."""
        return bool(self.process) and self.host == socket.gethostname() and identity(self.pid) == self.process


@dataclass(frozen=True)
class Started:
    """The notes on one run folder; what is not there is empty.

    Attributes:
        command: the argument list.
        cwd: the folder it starts in.
        created: Unix time of the wish; the run may have waited in the queue since.
        supervisor: the process that waits for the run's and notes how it ended.
        child: the run's own process.
        code: its exit code, negative for a signal; None while it is not known.
        ended: Unix time of that.
        out_of_memory: the system ended processes for want of memory meanwhile.
        stop_asked: Unix time at which the web UI asked it to stop.
        unreadable: names of notes that are damaged, or that somebody else wrote.
    """

    command: tuple[str, ...] = ()
    cwd: str = ""
    created: float = 0.0
    supervisor: Process | None = None
    child: Process | None = None
    code: int | None = None
    ended: float = 0.0
    out_of_memory: bool = False
    stop_asked: float = 0.0
    unreadable: tuple[str, ...] = field(default=())

    @property
    def alive(self) -> bool:
        """Whether the run's process, or the supervisor that is about to start it, is there."""
        if self.child is not None and self.child.alive:
            return True
        return self.code is None and self.supervisor is not None and self.supervisor.alive


def folder_of(run: Path) -> Path:
    """Where the notes are."""
    return run / STARTED


def read_started(run: Path) -> Started | None:
    """The notes on a run folder; None where the web UI did not start what is in there."""
    folder = folder_of(run)
    if not folder.is_dir():
        return None
    values: dict[str, Any] = {}
    broken: list[str] = []
    for name in (_JOB, _PROCESS, _EXIT, _STOP):
        try:
            values |= read_json(folder / name, root=run)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError):
            broken.append(name)
    try:
        for name in ("supervisor", "child"):
            if name in values:
                _check(values[name])
                values[name] = Process(**values[name])
        _check(values)
        return Started(**{**values, "command": tuple(values.get("command", ())), "unreadable": tuple(broken)})
    except (TypeError, KeyError):
        return Started(unreadable=(*broken, _JOB))


_NUMBER = (int, float)
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("cwd", "process", "host"), str),
    **dict.fromkeys(("created", "ended", "stop_asked"), _NUMBER),
    **dict.fromkeys(("pid", "code"), int),
    **dict.fromkeys(("supervisor", "child"), Process),
    "command": list,
    "out_of_memory": bool,
}


def _check(values: dict[str, Any]) -> None:
    """Raises TypeError or KeyError where a note is not what this file writes; somebody else may have written it."""
    if not isinstance(values, dict):
        raise TypeError
    for name, value in values.items():
        large = isinstance(value, _NUMBER) and not abs(value) <= 2**53  # of a process, or a moment
        words = not isinstance(value, list) or all(isinstance(word, str) for word in value)
        if not isinstance(value, _KINDS[name]) or large or not words:
            raise TypeError(name)


def _own_folder(run: Path) -> Path:
    """Where the notes are written.

    Raises:
        OSError: it is a link, which somebody else has put there.
    """
    folder = folder_of(run)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", str(folder))
    return folder


def note_job(run: Path, command: list[str], cwd: Path, created: float) -> None:
    """Begins the notes anew: what is to be started. The text that earlier processes printed stays.

    Raises:
        OSError: they cannot be written.
    """
    folder = _own_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_EXIT, _STOP, _PROCESS, ANSWER):
        (folder / name).unlink(missing_ok=True)
    write_text(folder / _JOB, json.dumps({"command": command, "cwd": str(cwd), "created": created}, indent=1))


def note_process(run: Path, supervisor: Process, child: Process | None = None) -> None:
    """Who keeps the run, and the run's own process once it is there."""
    processes = {name: vars(one) for name, one in (("supervisor", supervisor), ("child", child)) if one is not None}
    write_text(_own_folder(run) / _PROCESS, json.dumps(processes, indent=1))


def note_exit(run: Path, code: int, ended: float, *, out_of_memory: bool) -> None:
    """How the run's process ended."""
    values = {"code": code, "ended": ended, "out_of_memory": out_of_memory}
    with suppress(OSError):  # a full disk, or a folder that was deleted: the status file speaks then
        write_text(_own_folder(run) / _EXIT, json.dumps(values))


def note_stop(run: Path, asked: float) -> None:
    """That the run was asked to stop."""
    folder = _own_folder(run)
    folder.mkdir(exist_ok=True)
    write_text(folder / _STOP, json.dumps({"stop_asked": asked}))
