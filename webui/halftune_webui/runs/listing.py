"""The list of runs, read from the disk and from nothing else; only what has changed is read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from halftune.core.files import read_text
from halftune.core.status import NAME, STARTED
from halftune_webui.runs.log_tail import METRICS
from halftune_webui.runs.state import FINISHED, PLAN, RESOLVED, RunState, is_run, look

_DEPTH = 3  # folders below the folder of runs
_WATCHED = (
    NAME,
    FINISHED,
    PLAN,
    RESOLVED,
    METRICS,
    *(f"{STARTED}/{name}.json" for name in ("job", "process", "exit", "stop")),
)
ELSEWHERE = Path(".board") / "elsewhere.txt"  # run folders that lie elsewhere, one a line


def run_folders(runs: Path) -> list[Path]:
    """Every run folder below ``runs``, and those that the board has started elsewhere."""
    found = list(_below(runs, _DEPTH))
    try:
        listed = read_text(runs / ELSEWHERE, root=runs).splitlines()
    except OSError:
        listed = []
    return [*found, *(Path(name) for name in dict.fromkeys(listed) if name and is_run(Path(name)))]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(
            (entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)), key=lambda entry: entry.name
        )
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = Path(entry.path)
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


@dataclass
class Listing:
    """The runs of a board. One object may serve every page; what it remembers is only a saving.

    Attributes:
        runs: the folder of runs.
    """

    runs: Path
    _known: dict[Path, tuple[tuple[tuple[int, int] | None, ...], RunState]] = field(default_factory=dict)

    def look(self, waiting: list[Path]) -> list[RunState]:
        """Every run: the living first, then those that wait in their order, then the latest."""
        queue = {path: place for place, path in enumerate(waiting)}
        states = [self._state(folder, folder in queue) for folder in run_folders(self.runs)]
        self._known = {state.folder: self._known[state.folder] for state in states if state.folder in self._known}
        states = _with_dependencies(states)
        return sorted(states, key=lambda one: (not one.live, queue.get(one.folder, len(queue)), -one.began))

    def _state(self, folder: Path, waits: bool) -> RunState:
        marks = tuple(_mark(folder / name) for name in _WATCHED)
        before = self._known.get(folder)
        # a living run may have died, and one that is not in the queue any more is started or stopped: looked at anew
        if before is not None and before[0] == marks and not before[1].live and (before[1].state == "queued") == waits:
            return before[1]
        state = look(folder, waits=waits)
        self._known[folder] = (marks, state)
        return state


def _with_dependencies(states: list[RunState]) -> list[RunState]:
    """A run whose process has not come to it yet says which run, that it depends on, the process is training."""
    trained = {state.worker: state.folder for state in states if state.live and state.phase != "starting"}
    return [
        replace(state, phase="first", first=trained[state.worker])
        if state.phase == "starting" and state.worker in trained
        else state
        for state in states
    ]


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
