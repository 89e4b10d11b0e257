"""Starting, stopping, resuming and deleting runs: detached processes that outlive the page and the web server."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from pathlib import Path

from halftune.config.load import LoadedConfig, load_config
from halftune.core.atomic import remove_folder, write_text
from halftune.core.errors import ConfigError, HalftuneError, TrainingError
from halftune.core.files import open_file
from halftune.core.processes.process import send
from halftune.core.status import NAME, read_status
from halftune.train.run_folder.lock import locked
from halftune.train.run_folder.start_or_resume import holds_results
from halftune_webui.paths import inside
from halftune_webui.runs import queue
from halftune_webui.runs.detached import launch
from halftune_webui.runs.listing import ELSEWHERE, run_folders
from halftune_webui.runs.started import CONFIG, Process, folder_of, note_job, note_stop, read_started
from halftune_webui.runs.state import FINISHED, is_live, is_run, look
from halftune_webui.runs.stored import command, working_folder
from halftune_webui.runs.waiting import OWN_FOLDER, waiting
from halftune_webui.settings import Settings

_PLACE = "training.output_dir"
_STARTING = "starting"  # of two pages that start into one folder, one can


def start(settings: Settings, recipe: str, *, wait: bool = False) -> Path:
    """Starts a run of its own folder, or puts it into the queue.

    Args:
        settings: limits of the web UI.
        recipe: YAML text that the web UI has examined already.
        wait: into the queue, which starts it when nothing else runs.

    Returns:
        the run folder.

    Raises:
        HalftuneError: the recipe is wrong, its folder lies outside the web UI's or holds a run or other things already.
    """
    settings.runs.mkdir(parents=True, exist_ok=True)
    draft = settings.runs / OWN_FOLDER / f"{time.time_ns()}.yaml"
    draft.parent.mkdir(exist_ok=True)
    try:
        write_text(draft, recipe)
        loaded = load_config(draft)
        with queue.locked(settings.runs, _STARTING):
            run = check_place(settings, loaded)
            shutil.rmtree(folder_of(run), ignore_errors=True)  # notes of a run that never made a step
            _take(run)
            shutil.move(draft, folder_of(run) / CONFIG)
            _remember(settings, run)
            _begin(settings, run, wait=wait)
    except OSError as error:
        what = f"the run cannot be started: {error.strerror}"
        raise TrainingError(what, where=str(error.filename), code="webui.cannot_start") from error
    finally:
        draft.unlink(missing_ok=True)
    return run


def check_place(settings: Settings, loaded: LoadedConfig) -> Path:
    """The folder of a new run: free, or that of a run which ended before its first step and left no result.

    Raises:
        HalftuneError: it lies outside the web UI's folders, or holds a run or other things already.
    """
    run = inside(settings.roots, loaded.run.training.output_dir)
    holds_something = run.is_dir() and any(run.iterdir())  # asked first: what another page puts there now is a run
    if is_run(run) or folder_of(run).is_dir():
        if is_in_use(settings, run):
            raise _taken(run)
    elif holds_something:
        raise ConfigError(
            "the folder contains other files",
            where=_PLACE,
            remedy="choose another training.output_dir",
            code="train.output_dir_taken",
        )
    return run


def _take(run: Path) -> None:
    """Makes the folder of the notes, which makes it a run: of two pages that start the same recipe, one can."""
    try:
        folder_of(run).mkdir(parents=True)
    except FileExistsError:
        raise _taken(run) from None


def _taken(run: Path) -> ConfigError:
    remedy = f"training.output_dir: {os.path.relpath(free_beside(run))} is free; or resume that run"
    what = "there is a run in this folder already"
    return ConfigError(what, where=_PLACE, remedy=remedy, code="train.output_dir_taken")


def free_beside(run: Path) -> Path:
    """A folder that is not there yet, called like a run with the next free number."""
    stem, dash, number = run.name.rpartition("-")
    stem = stem if dash and number.isdigit() and len(number) < 3 else run.name
    names = (run.with_name(f"{stem}-{number}") for number in itertools.count(2))
    return next(path for path in names if not os.path.lexists(path))


def is_in_use(settings: Settings, run: Path) -> bool:
    """Whether a run works, waits, or has left a result; one that never made a step and is over leaves its folder."""
    return is_live(run) or run in waiting(settings.runs) or holds_results(run)


def _remember(settings: Settings, run: Path) -> None:
    """A run that lies where the list does not look is written down."""
    if run not in run_folders(settings.runs):
        with open_file(settings.runs / ELSEWHERE, "ab", root=settings.runs) as file:
            file.write(f"{run}\n".encode())


def resume(settings: Settings, run: Path, *, wait: bool = False) -> None:
    """Goes on with a run from its newest checkpoint, with its own recipe.

    Raises:
        HalftuneError: it runs already, waits already, or is finished.
    """
    _check_own(settings, run)
    if is_live(run) or run in waiting(settings.runs):
        raise ConfigError("the run is running or waiting already", where=str(run), code="webui.run_active")
    if (run / FINISHED).is_file():
        what = "the run is finished"
        raise ConfigError(what, where=str(run), remedy="start a new one, or chat with it", code="train.run_finished")
    _begin(settings, run, wait=wait)


def _begin(settings: Settings, run: Path, *, wait: bool) -> None:
    try:
        note_job(run, command(settings, run), working_folder(settings, run), time.time())
        if wait:
            queue.add(settings.runs, run)
            queue.start_next(settings)
        else:
            launch(run, settings)
    except OSError as error:
        what = f"the run cannot be started: {error.strerror}"
        raise TrainingError(what, where=str(run), code="webui.cannot_start") from error


def start_now(settings: Settings, run: Path) -> None:
    """Starts a run that waits, beside whatever runs.

    Raises:
        HalftuneError: it does not wait (any more).
    """
    _check_own(settings, run)
    if not queue.remove(settings.runs, run):
        raise ConfigError("the run does not wait any more", where=str(run), code="webui.run_not_controllable")
    queue.begin(settings, run)


def stop(settings: Settings, run: Path, *, at_once: bool = False) -> None:
    """Asks a run to finish its step, save and leave. A waiting one leaves the queue.

    Args:
        settings: limits of the web UI.
        run: the run.
        at_once: it has been asked already, and shall leave without saving. A second click alone does not do that.

    Raises:
        HalftuneError: it does not run here.
    """
    _check_own(settings, run)
    if queue.remove(settings.runs, run):
        return
    process = _process(run)
    if process is None:
        raise ConfigError("the run does not run on this machine", where=str(run), code="webui.run_not_controllable")
    if look(run).state == "stopping" and not at_once:
        return
    note_stop(run, time.time())
    try:
        send(process.pid, process.process, signal.SIGTERM)
    except PermissionError as error:
        what = "the run belongs to another user"
        raise ConfigError(what, where=str(run), code="webui.run_not_controllable") from error


def _process(run: Path) -> Process | None:
    """The run's own process, where it is alive: that of the web UI's notes, else the one that its status names."""
    started = read_started(run)
    if started is not None and started.child is not None and started.child.alive:
        return started.child
    try:
        status = read_status(run / NAME)
    except (OSError, ValueError):
        return None
    process = Process(status.pid, status.process, status.host) if status is not None else None
    return process if process is not None and process.alive else None


def delete(settings: Settings, run: Path) -> None:
    """Deletes a run folder and everything in it.

    Raises:
        HalftuneError: it is none, lies outside the web UI's folders, or a process works on it.
    """
    _check_own(settings, run)
    queue.remove(settings.runs, run)
    if is_live(run):
        raise ConfigError("the run is still running", where=str(run), remedy="stop it first", code="webui.run_active")
    try:
        with locked(run):  # no run may begin in there meanwhile
            remove_folder(run)
    except OSError as error:
        what = f"the run cannot be deleted: {error.strerror}"
        raise TrainingError(what, where=str(run), code="core.cannot_write") from error


def _check_own(settings: Settings, run: Path) -> None:
    """Makes sure that a path from the browser is a run folder under the web UI's folders."""
    if inside(settings.roots, str(run)) != run or not is_run(run):
        raise ConfigError("not a run of this web UI", where=str(run), code="webui.unknown_run")


def find(settings: Settings, name: str) -> Path:
    """The run folder that the browser means by a path.

    Raises:
        HalftuneError: there is none under the web UI's folders.
    """
    run = inside(settings.roots, name)
    if not is_run(run):
        raise HalftuneError("there is no run any more", where=name, code="webui.unknown_run")
    return run
