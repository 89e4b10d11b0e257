"""Evaluations: ``halftune evaluate`` on finished runs, whose scores, plot and answers are kept in the job folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from halftune.config.rules.files import BUILTIN
from halftune.core.errors import ConfigError
from halftune.core.files import open_file
from halftune_webui.paths import check_links, inside
from halftune_webui.runs import start_stop
from halftune_webui.runs.results.job import answered, begin, jobs, new_folder, words_of_job
from halftune_webui.runs.state import RunState, is_live
from halftune_webui.runs.stored import check_model
from halftune_webui.settings import Settings

METRICS = ("exact", "squad", "f1", "rouge", "chrf")  # of answers; the loss is always measured
KIND = "evaluations"
_SHOWN = 20
_BYTES = 1 << 20  # of a line of answers, and of all files that are shown


def start(
    settings: Settings,
    runs: Sequence[str],
    *,
    base: bool = True,
    data: str = "",
    metrics: Sequence[str] = (),
    limit: int = 0,
) -> Path:
    """Start an evaluation.

    Args:
        settings: limits of the web UI.
        runs: paths of finished runs, of the browser.
        base: whether their base models are measured, too.
        data: a file, ``builtin:NAME`` or a hub id, of the browser; empty for the first run's evaluation set.
        metrics: of ``METRICS``.
        limit: how many rows at most; 0 for all.

    Returns:
        the job folder, which gets the files.

    Raises:
        HalftuneError: a run, its model or the data lie outside the web UI's folders or would run code; a run is not
            finished; there is no such metric.
    """
    found = [start_stop.find(settings, name) for name in dict.fromkeys(runs)]
    if not found:
        what, remedy = "no run is chosen", "choose a run that has a result"
        raise ConfigError(what, remedy=remedy, code="webui.unknown_run")
    for run in found:
        if is_live(run):
            raise ConfigError("the run is still running", where=str(run), remedy="wait for it", code="webui.run_active")
        check_model(settings, run, "model", *(("data",) if run == found[0] and not data else ()))
    if data and not data.startswith(BUILTIN):
        check_links(settings.roots, inside(settings.roots, data))
    if unknown := [name for name in metrics if name not in METRICS]:
        what = f"there is no metric {unknown[0]}"
        raise ConfigError(what, remedy=" | ".join(METRICS), code="evaluate.unknown_metric")
    if limit < 0:
        raise ConfigError(f"{limit} rows", remedy="at least 1", code="cli.bad_option_value")
    job = new_folder(settings, KIND, found[0].name)
    words = ["evaluate", *map(str, found), "--base" if base else "--no-base", "--output", str(job), "--json"]
    words += [f"--data={data}"] if data else []
    words += [f"--metrics={','.join(metrics)}"] if metrics else []
    begin(settings, job, *words, *([f"--limit={limit}"] if limit else []))
    return job


def evaluations(settings: Settings) -> list[Path]:
    """The job folders of the latest evaluations, newest first."""
    return jobs(settings, KIND, _SHOWN)


def stand(job: Path) -> tuple[RunState, dict[str, Any]]:
    """How an evaluation stands, and the verb's answer; an empty one while there is none."""
    return answered(job)


def runs_of(job: Path) -> list[Path]:
    """The runs that are measured."""
    words = words_of_job(job)
    after = words[words.index("evaluate") + 1 :] if "evaluate" in words else ()
    return list(map(Path, takewhile(lambda word: not word.startswith("--"), after)))


def data_of(job: Path) -> str:
    """The data that was asked for; empty for the run's own."""
    return next((word.partition("=")[2] for word in words_of_job(job) if word.startswith("--data=")), "")


def read_file(job: Path, name: str) -> bytes:
    """A file of an evaluation; empty where it is not there, a link, or larger than a mebibyte."""
    try:
        with open_file(job / Path(name).name, root=job) as file:
            found = file.read(_BYTES + 1)
    except (OSError, ValueError):
        return b""
    return found if len(found) <= _BYTES else b""


def answers(job: Path, name: str, most: int) -> list[dict[str, Any]]:
    """The first answers of a model.

    Args:
        job: of the evaluation.
        name: of its file, by the verb's answer.
        most: how many.
    """
    try:
        with open_file(job / Path(name).name, root=job) as file:
            lines = [json.loads(line) for line in (file.readline(_BYTES) for _ in range(most)) if line]
    except (OSError, ValueError):
        return []
    return [line for line in lines if isinstance(line, dict)]
