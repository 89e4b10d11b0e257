"""The queue of waiting runs: a file in the runs folder. The next run starts when no other run is active.

Each supervisor executes this program after its run if any run waits. The web UI checks the queue when it shows the
list. So the queue also advances while no web UI is running.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.files import open_file
from halftune_webui.paths import inside, is_below
from halftune_webui.runs.detached import launch
from halftune_webui.runs.listing import run_folders
from halftune_webui.runs.log_tail import MARK
from halftune_webui.runs.started import CONSOLE, folder_of, note_exit, note_job, read_started
from halftune_webui.runs.state import is_live
from halftune_webui.runs.stored import command, working_folder
from halftune_webui.runs.waiting import OWN_FOLDER, QUEUE, waiting
from halftune_webui.settings import Settings

_LOCK = "lock"


def add(runs: Path, run: Path) -> None:
    """Puts a run, whose job has been noted, at the end of the queue."""
    with locked(runs):
        _write(runs, [*(one for one in waiting(runs) if one != run), run])


def remove(runs: Path, run: Path) -> bool:
    """Takes a run out of the queue; whether it was in there."""
    with locked(runs):
        listed = waiting(runs)
        _write(runs, [one for one in listed if one != run])
    return run in listed


def start_next(settings: Settings) -> Path | None:
    """Starts the first run of the queue, unless one runs already or none waits."""
    runs = settings.runs
    if not waiting(runs):
        return None
    with locked(runs):
        listed = waiting(runs)
        if any(is_live(run) for run in run_folders(runs)):
            return None
        for number, run in enumerate(listed):
            if not run.is_dir():  # a folder that was deleted waits no longer
                continue
            try:
                begin(settings, run)
            except HalftuneError as error:  # the files of the queue and of the run may be anybody's
                _refuse(settings, run, error)
                continue
            _write(runs, listed[number + 1 :])
            return run
        _write(runs, [])
    return None


def begin(settings: Settings, run: Path) -> None:
    """Starts a run that has waited, as the web UI would start it now, whatever was noted about it.

    Raises:
        HalftuneError: it lies outside the web UI's folders, or its recipe leaves the limits.
    """
    if inside(settings.roots, str(run)) != run:
        raise ConfigError("not a run of this web UI", where=str(run), code="webui.unknown_run")
    noted = read_started(run)
    created = noted.created if noted is not None else time.time()
    note_job(run, command(settings, run), working_folder(settings, run), created)
    launch(run, settings)


def _refuse(settings: Settings, run: Path, error: HalftuneError) -> None:
    """Notes why a run was not started, where that is ours to write."""
    if folder_of(run).is_dir() and is_below(settings.roots, run):
        with suppress(OSError), open_file(folder_of(run) / CONSOLE, "ab", root=run) as console:
            console.write(f"{MARK}halftune train\nhalftune train: {error}\n".encode())
        note_exit(run, error.exit_code, time.time(), out_of_memory=False)


@contextmanager
def locked(runs: Path, name: str = _LOCK) -> Iterator[None]:
    """Holds the lock of that name among all web UIs of a folder of runs."""
    (runs / OWN_FOLDER).mkdir(parents=True, exist_ok=True)
    with open_file(runs / OWN_FOLDER / name, "ab", root=runs) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(runs: Path, listed: list[Path]) -> None:
    write_text(runs / OWN_FOLDER / QUEUE, json.dumps([str(run) for run in listed], indent=1))


if __name__ == "__main__":
    start_next(Settings.from_json(sys.argv[1]))
