"""Exports as processes of their own, with notes and progress like a run's."""

from __future__ import annotations

import os
import time
from pathlib import Path

from halftune.core.errors import ConfigError
from halftune.core.status import NAME
from halftune.export.output import check_output
from halftune_webui.paths import inside
from halftune_webui.runs.detached import launch
from halftune_webui.runs.started import note_job, read_started
from halftune_webui.runs.state import FINAL, RunState, look
from halftune_webui.runs.stored import check_model
from halftune_webui.runs.waiting import OWN_FOLDER
from halftune_webui.settings import Settings

DTYPES = ("bf16", "fp16", "fp32")
_SHOWN = 8


def finished(runs: list[RunState]) -> list[Path]:
    """The runs that have a result."""
    return [state.folder for state in runs if (state.folder / FINAL).is_dir() and not state.live]


def start(settings: Settings, run: Path, output: str, dtype: str | None, *, force: bool, how: str = "") -> Path:
    """Starts an export.

    Args:
        settings: limits of the web UI.
        run: a finished run.
        output: folder to write, of the browser.
        dtype: one of ``DTYPES``, or None for the base checkpoint's own.
        force: replace an earlier export there.
        how: what to do where there is one.

    Returns:
        the folder of its notes.

    Raises:
        HalftuneError: the output lies outside the web UI's folders, holds something, or is being written.
    """
    if not output.strip():
        what = "there is no name for the output folder"
        raise ConfigError(what, remedy="choose a folder", code="export.output_unusable")
    target = inside(settings.roots, output)
    check_output(run, run / FINAL, target, force=force, how=how)
    if any(state.live and output_of(state.folder) == str(target) for state in exports(settings)):
        what = "is being written by another export"
        raise ConfigError(what, where=output, remedy="wait for it, or stop it", code="export.output_unusable")
    check_model(settings, run)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"there is no format {dtype}", remedy=" | ".join(DTYPES), code="core.unknown_name")
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
    job = settings.runs / OWN_FOLDER / "exports" / f"{moment}-{target.name}"
    job.mkdir(parents=True, exist_ok=True)
    command = [*settings.program, "export", str(run), "--output", str(target), "--status", str(job / NAME)]
    command += (["--dtype", dtype] if dtype else []) + (["--force"] if force else [])
    note_job(job, command, Path.cwd(), time.time())
    launch(job, settings)
    return job


def exports(settings: Settings) -> list[RunState]:
    """The latest exports, newest first."""
    folder = settings.runs / OWN_FOLDER / "exports"
    jobs = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    return [look(job) for job in jobs[:_SHOWN] if job.is_dir()]


def size_of(folder: Path) -> int:
    """Bytes of a model's files."""
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return 0


def run_of(job: Path) -> str:
    """The run whose result an export writes."""
    command = _command(job)
    return command[command.index("export") + 1] if "export" in command[:-1] else ""


def _command(job: Path) -> tuple[str, ...]:
    started = read_started(job)
    return tuple(started.command) if started is not None else ()


def output_of(job: Path) -> str:
    """The folder that an export writes."""
    command = _command(job)
    return command[command.index("--output") + 1] if "--output" in command[:-1] else job.name
