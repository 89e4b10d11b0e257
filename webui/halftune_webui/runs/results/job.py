"""A verb on a result in a process of its own; its notes and its answer lie in a job folder, which outlives the page."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from halftune.core.files import read_json
from halftune_webui.runs.detached import launch
from halftune_webui.runs.started import ANSWER, folder_of, note_job, read_started
from halftune_webui.runs.state import RunState, look
from halftune_webui.runs.waiting import OWN_FOLDER
from halftune_webui.settings import Settings


def new_folder(settings: Settings, kind: str, name: str) -> Path:
    """The folder of a new job, not made yet; later ones sort after earlier ones."""
    moment = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}"
    return settings.runs / OWN_FOLDER / kind / f"{moment}-{name}"


def begin(settings: Settings, job: Path, *words: str) -> None:
    """Start a verb; returns at once.

    Args:
        settings: limits of the web UI.
        job: the folder of its notes.
        words: the verb and its options.

    Raises:
        OSError: the notes cannot be written.
    """
    job.mkdir(parents=True, exist_ok=True)
    note_job(job, [*settings.program, *words], Path.cwd(), time.time())
    launch(job, settings)


def jobs(settings: Settings, kind: str, most: int) -> list[Path]:
    """The latest job folders of a kind, newest first."""
    folder = settings.runs / OWN_FOLDER / kind
    found = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    return [job for job in found[:most] if job.is_dir()]


def words_of_job(job: Path) -> tuple[str, ...]:
    """The verb and its options; empty where the notes cannot be read."""
    started = read_started(job)
    return tuple(started.command) if started is not None else ()


def value_of(job: Path, option: str, default: str = "") -> str:
    """What stands behind an option of the verb."""
    words = words_of_job(job)
    return words[words.index(option) + 1] if option in words[:-1] else default


def answered(job: Path) -> tuple[RunState, dict[str, Any]]:
    """How a verb with ``--json`` stands, and its answer; an empty one while there is none."""
    state = look(job)
    if state.live:  # such a verb tells no phase
        return replace(state, state="running", phase="") if state.state == "starting" and state.worker else state, {}
    try:
        answer = read_json(folder_of(job) / ANSWER, root=job)
    except (OSError, ValueError):
        return state, {}
    if not isinstance(answer, dict) or not answer or state.state == "stopped":
        return state, {}
    return state if "error" in answer else replace(state, state="finished", end="", cause=""), answer
