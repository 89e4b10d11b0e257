"""Exports: which targets there are, and what may be written where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from halftune.core.errors import ConfigError
from halftune.core.status import NAME
from halftune.export.output import check_output
from halftune_webui.paths import inside
from halftune_webui.runs.results.job import begin, jobs, new_folder, value_of, words_of_job
from halftune_webui.runs.state import FINAL, RunState, look
from halftune_webui.runs.stored import check_model
from halftune_webui.settings import Settings

KIND, FOLDER = "exports", "folder"
_SHOWN = 8


@dataclass(frozen=True)
class Target:
    """What an export can write.

    Attributes:
        words: options of the verb that choose it.
        option: the option for the format of its weights; empty where there is no choice.
        formats: the values of that option.
    """

    words: tuple[str, ...] = ()
    option: str = ""
    formats: tuple[str, ...] = ()


def targets(settings: Settings) -> dict[str, Target]:
    """Every target by its name, as ``halftune export`` takes them; the plain folder first."""
    choices = {option: tuple(values) for option, values in settings.export_choices.items()}
    found = {FOLDER: Target((), "--dtype", choices.get("--dtype", ()))}
    for name in choices.get("--format", ()):
        kinds = choices.get(option := f"--{name}-type", ())
        found.setdefault(name, Target(("--format", name), option if kinds else "", kinds))
    return found | {name: Target(("--quantize", name)) for name in choices.get("--quantize", ())}


def finished(runs: list[RunState]) -> list[Path]:
    """The runs that have a result."""
    return [state.folder for state in runs if (state.folder / FINAL).is_dir() and not state.live]


def start(
    settings: Settings,
    run: Path,
    output: str,
    target: str = FOLDER,
    stored: str | None = None,
    *,
    force: bool,
    how: str = "",
) -> Path:
    """Start an export.

    Args:
        settings: limits of the web UI.
        run: a finished run.
        output: folder to write, of the browser.
        target: one of :func:`targets`.
        stored: one of the target's formats, or None for its default.
        force: replace an earlier export there.
        how: what to do where there is one.

    Returns:
        the folder of its notes.

    Raises:
        HalftuneError: the output lies outside the web UI's folders, holds something, or is being written; or there is
            no such target or format.
    """
    if not output.strip():
        what = "there is no name for the output folder"
        raise ConfigError(what, remedy="choose a folder", code="export.output_unusable")
    folder = inside(settings.roots, output)
    check_output(run, run / FINAL, folder, force=force, how=how)
    if any(state.live and output_of(state.folder) == str(folder) for state in exports(settings)):
        what = "is being written by another export"
        raise ConfigError(what, where=output, remedy="wait for it, or stop it", code="export.output_unusable")
    check_model(settings, run)
    wanted = options(settings, target, stored)
    job = new_folder(settings, KIND, folder.name)
    words = ["export", str(run), "--output", str(folder), "--status", str(job / NAME), *wanted]
    begin(settings, job, *words, *(["--force"] if force else []))
    return job


def options(settings: Settings, target: str, stored: str | None) -> list[str]:
    """The options for a target and the format of its weights.

    Raises:
        ConfigError: there is no such target, or it has no such format.
    """
    known = targets(settings)
    if target not in known:
        raise ConfigError(f"there is no format {target}", remedy=" | ".join(known), code="core.unknown_name")
    row = known[target]
    if stored is None:
        return list(row.words)
    if stored not in row.formats:
        raise ConfigError(f"there is no format {stored}", remedy=" | ".join(row.formats), code="core.unknown_name")
    return [*row.words, row.option, stored]


def exports(settings: Settings) -> list[RunState]:
    """The latest exports, newest first."""
    return [look(job) for job in jobs(settings, KIND, _SHOWN)]


def size_of(folder: Path) -> int:
    """Bytes of a model's files."""
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return 0


def run_of(job: Path) -> str:
    """The run whose result an export writes."""
    return value_of(job, "export")


def output_of(job: Path) -> str:
    """The folder that an export writes."""
    return value_of(job, "--output", job.name)


def target_of(settings: Settings, job: Path) -> tuple[str, str]:
    """The target of an export, and the format of its weights; that is empty for the default."""
    pairs, known = list(pairwise(words_of_job(job))), targets(settings)
    target = next((name for name, row in known.items() if row.words and row.words in pairs), FOLDER)
    return target, value_of(job, known[target].option) if known[target].option else ""
