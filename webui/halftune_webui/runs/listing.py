"""The list of runs, read from the disk and from nothing else; only what has changed is read again."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from halftune.core.files import read_text
from halftune.core.status import NAME, STARTED
from halftune_webui.runs.state import RunState, is_run, look

_DEPTH = 3  # folders below the folder of runs
# What is looked at to see whether a run that nobody works on has changed: the folder, whose time changes when a file in
# it is replaced, the notes on its process, and its status, which on a full disk is written over in place.
_WATCHED = ("", f"/{STARTED}", f"/{NAME}")
ELSEWHERE = Path(".webui") / "elsewhere.txt"  # run folders that lie elsewhere, one a line
_Marks = tuple[int | None, ...]


def run_folders(runs: Path) -> list[Path]:
    """Every run folder below ``runs``, and those that the web UI has started elsewhere."""
    return list(map(Path, _folders(runs, ())))


def _folders(runs: Path, known: Container[str]) -> list[str]:
    """The same as text; ``known`` ones were runs before, and are not looked into."""
    found = list(_below(str(runs), _DEPTH, known))
    try:
        listed = read_text(runs / ELSEWHERE, root=runs).splitlines()
    except OSError:
        listed = []
    return [*found, *(name for name in dict.fromkeys(listed) if name and (name in known or is_run(Path(name))))]


def _below(folder: str, depth: int, known: Container[str]) -> Iterator[str]:
    try:
        with os.scandir(folder) as found:
            names = sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if name.startswith("."):
            continue
        path = f"{folder}/{name}"
        if path in known or is_run(Path(path)):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1, known)


@dataclass
class Listing:
    """The runs of a web UI. One object may serve every page; what it remembers is only a saving.

    Attributes:
        runs: the folder of runs.
    """

    runs: Path
    _known: dict[str, tuple[_Marks, RunState]] = field(default_factory=dict)

    def look(self, waiting: list[Path]) -> list[RunState]:
        """Every run: the living first, then those that wait in their order, then the latest."""
        queue = {path: place for place, path in enumerate(waiting)}
        known: dict[str, tuple[_Marks, RunState]] = {}
        waits = set(map(str, waiting))
        for name in _folders(self.runs, self._known):
            if (found := self._state(name, name in waits)) is not None:
                known[name] = found
        self._known = known
        states = _with_places(_with_dependencies([state for _, state in known.values()]), queue)
        return sorted(states, key=lambda one: (not one.live, queue.get(one.folder, len(queue)), -one.began))

    def _state(self, name: str, waits: bool) -> tuple[_Marks, RunState] | None:
        before = self._known.get(name)
        # a living run may have died, and one that is not in the queue any more is started or stopped: looked at anew
        if before is not None and not before[1].live and (before[1].state == "queued") == waits:
            # whatever goes on with a finished run begins with a new file in its folder
            watched = _WATCHED[:1] if before[1].state == "finished" else _WATCHED
            if all(_mark(f"{name}{part}") == mark for part, mark in zip(watched, before[0], strict=False)):
                return before
        if before is not None and not is_run(Path(name)):
            return None
        return tuple(_mark(f"{name}{part}") for part in _WATCHED), look(Path(name), waits=waits)


def _with_dependencies(states: list[RunState]) -> list[RunState]:
    """A run whose process has not come to it yet says which run, that it depends on, the process is training."""
    trained = {state.worker: state.folder for state in states if state.live and state.phase != "starting"}
    return [
        replace(state, phase="first", first=trained[state.worker])
        if state.phase == "starting" and state.worker in trained
        else state
        for state in states
    ]


def _with_places(states: list[RunState], queue: dict[Path, int]) -> list[RunState]:
    """A run that waits says its place in the queue, from 1, and the run that it waits for."""
    living = [state.folder for state in states if state.live]
    ahead = [*living[:1], *queue]
    return [
        replace(state, place=(place := queue[state.folder]) + 1, behind=ahead[place] if living else None)
        if state.state == "queued"
        else state
        for state in states
    ]


def _mark(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
