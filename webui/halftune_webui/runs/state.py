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
from halftune.config.shape import child
from halftune.core.errors import ConfigError
from halftune.core.process import identity
from halftune.core.status import NAME, Status, read_json, read_status
from halftune_webui.runs.log_tail import last_metrics, root_cause
from halftune_webui.runs.started import CONFIG, Started, folder_of, read_started

State = Literal["queued", "starting", "running", "stopping", "finished", "stopped", "died", "unreadable"]
LIVE = ("starting", "running", "stopping")
RESOLVED, FINISHED, PLAN, FINAL = "resolved.yaml", "finished.json", "plan.json", "final"
_SILENT = 120.0  # seconds after which a run on another machine counts as gone
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
        began: Unix time of the begin of its latest sitting (of the wish, while it waits).
        end: how it died where it had no last word: ``killed | killed_memory | crashed | restarted | vanished``.
        cause: the last error in words, or what cannot be read; the signal's name of a crash.
        model, precision: what is trained, and the computing format, where a plan has been made.
        host: another machine that it runs on; empty for this one.
        casts: attention calls whose operands had left the planned format.
        board: whether the board started it.
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
    board: bool = False
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
    started = read_started(folder)
    plan = _json(folder / PLAN)
    common: dict[str, Any] = {
        "folder": folder,
        "model": str((plan or {}).get("model", "")) or _asked_model(folder),
        "precision": _value(plan or {}, "precision", "compute"),
        "board": started is not None,
    }
    try:
        status = read_status(folder / NAME)
        if started is not None and started.unreadable:
            raise ValueError(f"{', '.join(started.unreadable)} cannot be read")
        if plan is None:
            raise ValueError(f"{PLAN} cannot be read")
    except (OSError, ValueError) as error:
        return RunState(state="unreadable", cause=str(error), **common)
    began = max(status.started if status else 0.0, started.created if started else 0.0)
    common["began"] = began or _modified(folder)
    if (started is not None and started.alive) or (status is not None and _alive(status)):
        return _of_living(started, status, common)
    numbers = _numbers(folder, status)
    if waits:
        return RunState(state="queued", **numbers, **common)
    if (folder / FINISHED).is_file() or (status is not None and status.state == "finished"):
        return RunState(state="finished", **numbers, **common)
    state, end, cause = _of_dead(folder, started, status)
    return RunState(state=state, end=end, cause=cause, **numbers, **common)


def _of_living(started: Started | None, status: Status | None, common: dict[str, Any]) -> RunState:
    ours = status is not None and _alive(status)
    if started is not None and started.child is not None and not started.child.alive:  # its keeper will note how
        numbers = _numbers(common["folder"], status)
        return RunState(state="stopping" if started.stop_asked else "running", phase="finished", **numbers, **common)
    if status is None or not ours:  # the process is there, and has not said anything yet
        stopping = started is not None and started.stop_asked > 0
        child = started.child if started is not None else None
        worker = (child.pid, child.process) if child is not None else None
        return RunState(state="stopping" if stopping else "starting", phase="starting", worker=worker, **common)
    stopping = started is not None and started.stop_asked > status.started
    return RunState(
        state="stopping" if stopping else "running",
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


def _of_dead(folder: Path, started: Started | None, status: Status | None) -> tuple[State, str, str]:
    """State, kind of end and cause of a run without a process and without a result."""
    if started is not None and started.keeper is None and started.created > (status.started if status else 0.0):
        return "stopped", "", ""  # taken out of the queue
    spoke = status is not None and (started is None or started.child is None or status.pid == started.child.pid)
    if spoke and status is not None and status.state in ("stopped", "failed"):
        return ("stopped" if status.state == "stopped" else "died"), "", status.error
    code = started.code if started is not None else None
    if code is None:
        if status is None or status.state != "running":
            return "died", "vanished", root_cause(folder)
        here = (identity(os.getpid()) or "").partition(":")[0]
        return "died", "killed" if status.process.partition(":")[0] == here else "restarted", ""
    if code in _STOP_CODES:
        return "stopped", "", root_cause(folder) if code > 0 else ""
    if code > 0:
        return "died", "", root_cause(folder) or f"exit code {code}"
    assert started is not None
    if code == -signal.SIGKILL:
        return "died", "killed_memory" if started.out_of_memory else "killed", ""
    known = {int(number): number.name for number in signal.Signals}
    return "died", "crashed", known.get(-code, f"signal {-code}")


def _numbers(folder: Path, status: Status | None) -> dict[str, Any]:
    if status is not None and (status.loss is not None or not status.step):
        return {"step": status.step, "total": status.total, "loss": status.loss, "casts": status.casts}
    line = last_metrics(folder)  # not finite, or a run that has gone on and not made a step yet
    loss = line.get("loss", math.nan) if line else None
    numbers = {"step": line.get("step", 0), "loss": math.nan if line and loss is None else loss}
    return numbers if status is None else {**numbers, "step": status.step, "total": status.total, "casts": status.casts}


def _alive(status: Status) -> bool:
    if status.host and status.host != socket.gethostname():
        return status.state == "running" and time.time() - status.updated < _SILENT
    return bool(status.process) and identity(status.pid) == status.process


def _asked_model(folder: Path) -> str:
    """The model that the recipe of a run names which has no plan yet."""
    file = folder_of(folder) / CONFIG
    if not file.is_file() or file.is_symlink():
        return ""
    try:
        recipe = parse(read_text(file), CONFIG).values
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
