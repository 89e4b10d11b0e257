"""What a card shows on demand: the command, the model's answers, name, tags and note; and how recipes differ."""

from __future__ import annotations

import math
import shlex
import stat
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from markupsafe import Markup

from halftune.config.reading.yaml_source import MAX_BYTES, parse
from halftune.core.errors import ConfigError
from halftune.core.files import read_json, read_text
from halftune.train.run_folder.same_run import flat
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.recipes.form import display
from halftune_webui.runs.state import RESOLVED
from halftune_webui.runs.stored import words_of
from halftune_webui.runs.view.show import Mark, name_of
from halftune_webui.settings import Settings

SAMPLES, ROLLOUTS = "samples.json", "rollouts.json"
_PROMPTS, _ANSWERS = 20, 64
_PLACES = ("training.output_dir",)  # where, not what


def details(run: Path, mark: Mark, words: Words, *, served: bool = False) -> Markup:
    """The command, the model's answers before and after training and those that were rewarded, and the form.

    Args:
        run: the run.
        mark: what was said of it.
        words: the labels.
        served: whether its result can be served; the command for that is shown, too.
    """
    command = command_line(shlex.join(words_of(run)), words)
    if served:
        command += command_line(shlex.join(["halftune", "serve", str(run)]), words, "serve")
    samples = _samples(*_marked(run / SAMPLES))
    rollouts = _rollouts(*_marked(run / ROLLOUTS))
    shown = {"command": command, "samples": samples, "rollouts": rollouts}
    return render("run_details", run=run, mark=mark, words=words, **shown)


def command_line(command: str, words: Words, label: str = "command") -> Markup:
    """A command of the command line, with a button that copies it; ``runs.LABEL`` says what it does."""
    return render("command", command=command, label=label, words=words)


@lru_cache(maxsize=64)
def _samples(path: Path | None, mark: tuple[int, int]) -> tuple[tuple[str, str, str], ...]:
    try:
        rows = read_json(path, root=path.parent)["samples"] if path is not None else []
        return tuple(
            (str(row.get("prompt") or ""), str(row.get("before") or ""), str(row.get("after") or ""))
            for row in islice(rows, _PROMPTS)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file may be anybody's
        return ()


@lru_cache(maxsize=64)
def _rollouts(
    path: Path | None, mark: tuple[int, int]
) -> tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...]:
    """Step, prompt and answers with reward and number of tokens; the newest first, and the best answer first."""
    try:
        groups = read_json(path, root=path.parent)["rollouts"] if path is not None else []
        found = []
        for group in islice(reversed(groups), _PROMPTS):
            # an answer that no function judged has no reward, and comes last
            answers = [(one, one["reward"]) for one in islice(group["answers"], _ANSWERS)]
            answers.sort(key=lambda one: -math.inf if one[1] is None else float(one[1]), reverse=True)
            rows = [
                (str(one["text"]), "–" if reward is None else f"{float(reward):.3g}", str(int(one["tokens"])))
                for one, reward in answers
            ]
            found.append((str(int(group["step"])), str(group["prompt"]), tuple(rows)))
        return tuple(found)
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError):  # the file may be anybody's
        return ()


def differences(opened: Sequence[Path], settings: Settings, words: Words) -> Markup:
    """The keys in which the recipes of the open runs differ, one column for each run; empty below two runs."""
    flats = {run: flat for run in opened if (flat := _flat_recipe(*_marked(run / RESOLVED)))}
    if len(flats) < 2:
        return Markup()
    rows = {key: [flat.get(key, "") for flat in flats.values()] for key in dict.fromkeys(chain(*flats.values()))}
    rows = [(key, values) for key, values in rows.items() if len(set(values)) > 1 and key not in _PLACES]
    return render("differences", rows=rows, names=[name_of(run, settings.runs) for run in flats], words=words)


@lru_cache(maxsize=64)
def _flat_recipe(path: Path | None, mark: tuple[int, int]) -> dict[str, str]:
    if path is None or mark[1] > MAX_BYTES:
        return {}
    try:
        leaves = flat(parse(read_text(path, root=path.parent), RESOLVED).values)
        return {key: display(value) for key, value in leaves.items()}
    except (OSError, ConfigError):
        return {}


def _marked(path: Path) -> tuple[Path | None, tuple[int, int]]:
    """A file of a run with what tells that it has changed; None where it is not there, or a link."""
    try:
        found = path.lstat()
    except OSError:
        return None, (0, 0)
    return (path if stat.S_ISREG(found.st_mode) else None), (found.st_mtime_ns, found.st_size)
