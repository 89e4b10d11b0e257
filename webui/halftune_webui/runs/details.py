"""What a card shows on demand: the command, answers before and after, name, tags and note; and how recipes differ."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from halftune.config.reading.yaml_source import MAX_BYTES, parse
from halftune.core.errors import ConfigError
from halftune.core.files import read_text
from halftune.core.status import read_json
from halftune_webui.form import display
from halftune_webui.labels import Words
from halftune_webui.runs.show import Mark, command_line, name_of
from halftune_webui.runs.state import RESOLVED
from halftune_webui.runs.stored import words_of
from halftune_webui.settings import Settings

SAMPLES = "samples.json"
_PROMPTS = 20
_PLACES = ("training.output_dir",)  # where, not what


def details(run: Path, mark: Mark, words: Words) -> str:
    """What stands in the card of a run before its log."""
    command = command_line(shlex.join(words_of(run)), words)
    return command + _answers(run, words) + _form(run, mark, words)


def _answers(run: Path, words: Words) -> str:
    """What the model answered to the recipe's prompts before training and after it; empty where it was not asked."""
    rows = _samples(*_marked(run / SAMPLES))
    if not rows:
        return ""
    head = "".join(f"<th>{escape(words(f'runs.answers.{name}'))}</th>" for name in ("prompt", "before", "after"))
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _folded("answers", run, words("runs.answers.title"), f'<div class="scroll answers">{table}</div>')


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


def _form(run: Path, mark: Mark, words: Words) -> str:
    key, path = escape(str(run)), escape(str(run))
    fields = "".join(
        f'<label>{escape(words(f"runs.mark.{name}"))}<input type="text" id="{name}-{key}" name="{name}" '
        f'value="{escape(value)}" autocomplete="off"></label>'
        for name, value in (("name", mark.name), ("tags", ", ".join(mark.tags)), ("note", mark.note))
    )
    save = f"<button>{escape(words('runs.mark.save'))}</button>"
    form = f'<form data-act="mark" data-run="{path}">{fields}{save}</form>'
    return _folded("mark", run, words("runs.mark.title"), form)


def _folded(kind: str, run: Path, title: str, inner: str) -> str:
    key = escape(f"{kind} {run}")
    return f'<details data-keep="{key}"><summary>{escape(title)}</summary>{inner}</details>'


def differences(opened: Sequence[Path], settings: Settings, words: Words) -> str:
    """The keys in which the recipes of the open runs differ, one column for each run; empty below two runs."""
    if len(opened) < 2:
        return ""
    flats = {run: _flat_recipe(*_marked(run / RESOLVED)) for run in opened}
    flats = {run: flat for run, flat in flats.items() if flat}
    keys = dict.fromkeys(key for flat in flats.values() for key in flat)
    rows = []
    for key in keys:
        values = [flat.get(key, "") for flat in flats.values()]
        if len(set(values)) > 1 and key not in _PLACES:
            rows.append(
                f"<tr><th scope=row>{escape(key)}</th>{''.join(f'<td>{escape(one)}</td>' for one in values)}</tr>"
            )
    title = words("runs.differences" if rows else "runs.no_differences", n=len(rows))
    if not rows or len(flats) < 2:
        return f'<p class="help">{escape(title)}</p>' if len(flats) > 1 else ""
    head = "".join(f"<th>{escape(name_of(run, settings.runs))}</th>" for run in flats)
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return (
        f'<section class="card differences"><details data-keep="differences" open><summary>{escape(title)}</summary>'
        f'<div class="scroll">{table}</div></details></section>'
    )


@lru_cache(maxsize=64)
def _flat_recipe(path: Path | None, mark: tuple[int, int]) -> dict[str, str]:
    if path is None or mark[1] > MAX_BYTES:
        return {}
    try:
        return dict(_flat(parse(read_text(path, root=path.parent), RESOLVED).values, ""))
    except (OSError, ConfigError):
        return {}


def _flat(tree: Any, prefix: str) -> Any:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", display(value)


def _marked(path: Path) -> tuple[Path | None, tuple[int, int]]:
    """A file of a run with what tells that it has changed; None where it is not there, or a link."""
    try:
        found = path.lstat()
    except OSError:
        return None, (0, 0)
    return (path if stat.S_ISREG(found.st_mode) else None), (found.st_mtime_ns, found.st_size)
