"""How one run stands, from its folder alone: state, progress, and where it died the root cause."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.tree import child
from halftune.core.errors import ConfigError
from halftune.core.files import read_json
from halftune.core.processes.process import identity
from halftune.core.status import NAME, Status, read_status
from halftune_webui.runs.log_tail import last_metrics, root_cause
from halftune_webui.runs.started import CONFIG, Started, folder_of, read_started

State = Literal["queued", "starting", "running", "stopping", "finished", "stopped", "died", "unreadable"]
LIVE = ("starting", "running", "stopping")
RESOLVED, FINISHED, PLAN, FINAL = "resolved.yaml", "finished.json", "plan.json", "final"
_SILENT = 120.0  # seconds after which a run on another machine counts as gone
_LAST_STATES: dict[str, State] = {"stopped": "stopped", "failed": "died"}  # of a status file
_STOP_CODES = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP, 129, 130, 143}


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    Attributes:
        folder: the run folder.
        state: what it does.
        phase: in words of the status file; empty where nothing runs.
        step, total: steps done, and in all (0: not known).
        seconds_left: at the pace so far, or None.
        loss: the last one; None where there is none yet.
        began: Unix time of the begin of its latest launch (of the wish, while it waits).
        end: how it died where it had no last word: ``killed | killed_memory | crashed | restarted | vanished``.
        cause: the last error in words, or what cannot be read; the signal's name of a crash.
        model, precision: what is trained, and the computing format, where a plan has been made.
        host: another machine that it runs on; empty for this one.
        casts: attention calls whose operands had left the planned format.
        worker: number and identity of its process; empty where none works.
        first: the run that it depends on, and that its process trains before it.
        place: where it stands in the queue, from 1; 0 where it does not wait.
        behind: the run that it waits for: the one before it in the queue, or the one that runs.
    """

    folder: Path
    state: State
    phase: str = ""
    step: int = 0
    total: int = 0
    seconds_left: float | None = None
    loss: float | None = None
    began: float = 0.0
    end: str = ""
    cause: str = ""
    model: str = ""
    precision: str = ""
    host: str = ""
    casts: int = 0
    worker: tuple[int, str] | None = None
    first: Path | None = None
    place: int = 0
    behind: Path | None = None

    @property
    def live(self) -> bool:
        """Whether a process works on it."""
        return self.state in LIVE


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, of any state."""
    return (folder / RESOLVED).is_file() or (folder / NAME).is_file() or read_started(folder) is not None


def is_live(folder: Path) -> bool:
    """Whether a process works on a run now."""
    started = read_started(folder)
    if started is not None and started.alive:
        return True
    try:
        status = read_status(folder / NAME)
    except (OSError, ValueError):
        return False
    return status is not None and _alive(status)


def look(folder: Path, *, waits: bool = False) -> RunState:
    """How a run stands.

    Args:
        folder: the run folder.
        waits: whether it is in the queue.
    """
    started, plan = read_started(folder) or Started(), _json(folder / PLAN)
    common = _described(folder, plan)
    try:
        _check_readable(started, plan)
        status = read_status(folder / NAME) or Status()
    except (OSError, ValueError) as error:
        return RunState(state="unreadable", cause=str(error), **common)
    common["began"] = max(status.started, started.created) or _modified(folder)
    if started.alive or _alive(status):
        return _of_living(started, status, common)
    numbers = _numbers(folder, status)
    if waits:
        return RunState(state="queued", **numbers, **common)
    if (folder / FINISHED).is_file() or status.state == "finished":
        return RunState(state="finished", **numbers, **common)
    state, end, cause = _of_dead(folder, started, status)
    return RunState(state=state, end=end, cause=cause, **numbers, **common)


def _described(folder: Path, plan: dict[str, Any] | None) -> dict[str, Any]:
    """What does not depend on the run's state."""
    plan = plan or {}
    model = str(plan.get("model", "")) or _asked_model(folder)
    return {"folder": folder, "model": model, "precision": _value(plan, "precision", "compute")}


def _check_readable(started: Started, plan: dict[str, Any] | None) -> None:
    damaged = [*started.unreadable, *([PLAN] if plan is None else [])]
    if damaged:
        raise ValueError(f"{', '.join(damaged)} cannot be read")


def _of_living(started: Started, status: Status, common: dict[str, Any]) -> RunState:
    child = started.child
    if child is not None and not child.alive:  # its supervisor will note how
        numbers = _numbers(common["folder"], status)
        return RunState(state="stopping" if started.stop_asked else "running", phase="finished", **numbers, **common)
    if not _alive(status):  # the process is there, and has not said anything yet
        state: State = "stopping" if started.stop_asked else "starting"
        worker = (child.pid, child.process) if child is not None else None
        return RunState(state=state, phase="starting", worker=worker, **common)
    return RunState(
        state="stopping" if started.stop_asked > status.started else "running",
        phase=status.phase,
        seconds_left=_left(status),
        **_numbers(common["folder"], status),
        host="" if status.host == socket.gethostname() else status.host,
        worker=(status.pid, status.process),
        **{**common, "began": status.started},
    )


def _left(status: Status) -> float | None:
    """The estimate, less the time since it was made."""
    return None if status.seconds_left is None else max(0.0, status.seconds_left - (time.time() - status.updated))


def _of_dead(folder: Path, started: Started, status: Status) -> tuple[State, str, str]:
    """State, kind of end and cause of a run without a process and without a result."""
    if started.supervisor is None and started.created > status.started:
        return "stopped", "", ""  # taken out of the queue
    if status.state in _LAST_STATES and (started.child is None or status.pid == started.child.pid):
        cause = f"{status.error} [{status.code}]" if status.code else status.error
        return _LAST_STATES[status.state], "", cause
    if started.code is not None:
        return _of_exit(folder, started.code, out_of_memory=started.out_of_memory)
    if not status.pid or status.state != "running":
        return "died", "vanished", root_cause(folder)
    return "died", _lost(status), ""


def _lost(status: Status) -> str:
    """Why a process is gone without a word: killed, or the machine was restarted since."""
    here = identity(os.getpid()) or ""
    return "killed" if status.process.partition(":")[0] == here.partition(":")[0] else "restarted"


def _of_exit(folder: Path, code: int, *, out_of_memory: bool) -> tuple[State, str, str]:
    """State, kind of end and cause, by the exit code."""
    if code in _STOP_CODES:
        return "stopped", "", root_cause(folder) if code > 0 else ""
    if code > 0:
        return "died", "", root_cause(folder) or f"exit code {code}"
    if code == -signal.SIGKILL:
        return "died", "killed_memory" if out_of_memory else "killed", ""
    known = {int(number): number.name for number in signal.Signals}
    return "died", "crashed", known.get(-code, f"signal {-code}")


def _numbers(folder: Path, status: Status) -> dict[str, Any]:
    known = {"step": status.step, "total": status.total, "casts": status.casts} if status.pid else {}
    if known and (status.loss is not None or not status.step):
        return {**known, "loss": status.loss}
    line = last_metrics(folder)  # not finite, or a run that has gone on and not made a step yet
    loss = line.get("loss", math.nan) if line else None
    return {"step": line.get("step", 0), "loss": math.nan if line and loss is None else loss, **known}


def _alive(status: Status) -> bool:
    if status.host and status.host != socket.gethostname():
        return status.state == "running" and time.time() - status.updated < _SILENT
    return bool(status.process) and identity(status.pid) == status.process


def _asked_model(folder: Path) -> str:
    """The model that the recipe of a run names which has no plan yet."""
    file = folder_of(folder) / CONFIG
    if not file.is_file():
        return ""
    try:
        recipe = parse(read_text(file, root=folder), CONFIG).values
    except ConfigError:
        return ""
    name = child(child(recipe, "model"), "name_or_path")
    return name if isinstance(name, str) else ""


def _json(path: Path) -> dict[str, Any] | None:
    """A JSON object; empty where there is no file, None where it cannot be read."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _value(tree: dict[str, Any], *keys: str) -> str:
    node: Any = tree
    for key in (*keys, "value"):
        node = node.get(key) if isinstance(node, dict) else None
    return "" if node is None else str(node)


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
