"""Asks a verb of halftune that answers in JSON, in a process of its own, so that the web UI never imports torch."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.errors import HalftuneError, Problems
from halftune_webui.recipes.recipe import LABEL
from halftune_webui.runs.detached import environment
from halftune_webui.runs.log_tail import cause_in
from halftune_webui.runs.waiting import OWN_FOLDER
from halftune_webui.settings import HALFTUNE

PATIENCE = 900.0  # seconds


class Stopped(HalftuneError):
    """The reader does not want the answer any more."""


@dataclass
class Asks:
    """Processes that pages wait for, one for each page: a page that asks anew, or is closed, ends the one before."""

    _of: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def stop(self, page: str) -> None:
        """Ends what a page waits for."""
        if process := self._of.pop(page, None):
            process.kill()

    def ask(
        self, page: str, verb: str, *arguments: str, good: Sequence[int] = (0,), recipe: Path | None = None
    ) -> dict[str, Any]:
        """What ``halftune VERB … --json`` answers.

        Args:
            page: who asks.
            verb: the verb.
            arguments: its options.
            good: exit codes that come with an answer.
            recipe: a file that holds a recipe of the browser, whose name there says nothing to a reader.

        Raises:
            Stopped: :meth:`stop` ended it.
            HalftuneError: it failed, in its own words, or took longer than a quarter of an hour.
        """
        self.stop(page)
        named = [] if recipe is None else ["--config", str(recipe)]
        command = [*HALFTUNE, verb, *named, *arguments, "--json"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        self._of[page] = process
        try:
            answered, said = (stream.decode(errors="replace") for stream in process.communicate(timeout=PATIENCE))
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            what = f"halftune {verb} took longer than {PATIENCE / 60:.0f} minutes"
            raise HalftuneError(what, code="webui.verb_failed") from error
        if self._of.get(page) is not process:
            raise Stopped(f"halftune {verb} was stopped", code="webui.stopped")
        del self._of[page]
        return _answer(verb, process.returncode, answered, said, good, recipe)


def _answer(verb: str, code: int, answered: str, said: str, good: Sequence[int], recipe: Path | None) -> dict[str, Any]:
    if recipe is not None:
        escaped = json.dumps(str(recipe))[1:-1]  # as a path with letters beyond ASCII stands in JSON
        said, answered = (text.replace(str(recipe), LABEL).replace(escaped, LABEL) for text in (said, answered))
    answer = _object(answered)
    if code not in good and (problems := problems_in(answer or {})):
        raise Problems(problems)
    if code not in good or answer is None:
        raise HalftuneError(cause_in(said) or f"halftune {verb} ended with code {code}", code="webui.verb_failed")
    return answer


def problems_in(answer: dict[str, Any]) -> list[HalftuneError]:
    """The problems that a verb with ``--json`` answers where it fails; none where it did not.

    Raises:
        KeyError, TypeError: the answer is not one of halftune.
    """
    listed = answer["error"]["problems"] if "error" in answer else []
    return [HalftuneError(one["what"], where=one["where"], remedy=one["remedy"], code=one["code"]) for one in listed]


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; None where the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def recipe_file(runs: Path, text: str) -> Iterator[Path]:
    """A file that holds a recipe of the browser, for as long as the block."""
    path = runs / OWN_FOLDER / f"{time.time_ns()}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_text(path, text)
        yield path
    finally:
        path.unlink(missing_ok=True)
