"""Asks a verb of halftune that answers in JSON, in a process of its own, so that the board never imports torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.errors import HalftuneError
from halftune_webui.recipe import LABEL
from halftune_webui.runs.detached import environment
from halftune_webui.runs.log_tail import cause_in
from halftune_webui.runs.queue import BOARD
from halftune_webui.settings import HALFTUNE

PATIENCE = 900.0  # seconds


def ask(verb: str, *arguments: str, good: Sequence[int] = (0,), recipe: Path | None = None) -> dict[str, Any]:
    """What ``halftune VERB … --json`` answers.

    Args:
        verb: the verb.
        arguments: its options.
        good: exit codes that come with an answer.
        recipe: a file that holds a recipe of the browser, whose name there says nothing to a reader.

    Raises:
        HalftuneError: it failed, in its own words, or took longer than a quarter of an hour.
    """
    named = [] if recipe is None else ["--config", str(recipe)]
    try:
        done = subprocess.run(
            [*HALFTUNE, verb, *named, *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise HalftuneError(f"halftune {verb} took longer than {PATIENCE / 60:.0f} minutes") from error
    said, answered = (stream.decode(errors="replace") for stream in (done.stderr, done.stdout))
    if recipe is not None:
        said, answered = (text.replace(str(recipe), LABEL) for text in (said, answered))
    try:
        answer = json.loads(answered)
    except ValueError:
        answer = None
    if done.returncode not in good or not isinstance(answer, dict):
        raise HalftuneError(cause_in(said) or f"halftune {verb} ended with code {done.returncode}")
    return answer


@contextmanager
def recipe_file(runs: Path, text: str) -> Iterator[Path]:
    """A file that holds a recipe of the browser, for as long as the block."""
    path = runs / BOARD / f"{time.time_ns()}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_text(path, text)
        yield path
    finally:
        path.unlink(missing_ok=True)
