"""Runs that wait for their turn: a file beside the runs, worked off one by one by whoever sees that nothing runs.

Each run's keeper looks when its run has ended, and a board looks whenever it shows the list; so the queue goes on
without a board, and a new board goes on with it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halftune.core.atomic import write_text
from halftune_webui.runs.keeper import launch
from halftune_webui.runs.listing import run_folders
from halftune_webui.runs.state import is_live

BOARD, _QUEUE, _LOCK = ".board", "queue.json", "lock"


def waiting(runs: Path) -> list[Path]:
    """Run folders in the queue, the next one first. Without a lock: the file is whole at every moment."""
    try:
        listed = json.loads((runs / BOARD / _QUEUE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [Path(one) for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def add(runs: Path, run: Path) -> None:
    """Puts a run, whose job has been noted, at the end of the queue."""
    with _locked(runs):
        _write(runs, [*(one for one in waiting(runs) if one != run), run])


def remove(runs: Path, run: Path) -> bool:
    """Takes a run out of the queue; whether it was in there."""
    with _locked(runs):
        listed = waiting(runs)
        _write(runs, [one for one in listed if one != run])
    return run in listed


def start_next(runs: Path) -> Path | None:
    """Starts the first run of the queue, unless one runs already or none waits."""
    if not waiting(runs):
        return None
    with _locked(runs):
        listed = waiting(runs)
        if any(is_live(run) for run in run_folders(runs)):
            return None
        for number, run in enumerate(listed):
            if run.is_dir():  # a folder that was deleted waits no longer
                launch(run, runs)
                _write(runs, listed[number + 1 :])
                return run
        _write(runs, [])
    return None


@contextmanager
def _locked(runs: Path) -> Iterator[None]:
    (runs / BOARD).mkdir(parents=True, exist_ok=True)
    with (runs / BOARD / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(runs: Path, listed: list[Path]) -> None:
    write_text(runs / BOARD / _QUEUE, json.dumps([str(run) for run in listed], indent=1))
