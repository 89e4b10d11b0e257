"""``training.learning_rate=1e-4`` on the command line: values that win over the file's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from halftune.config.reading.shorthand import expand
from halftune.config.reading.yaml_source import Place, Tree, parse_value
from halftune.config.shape import Path, child, dotted
from halftune.core.errors import ConfigError, HalftuneError

COMMAND_LINE = "command line"
KEY = re.compile(r"[A-Za-z_][\w-]*(\[\d+\]|\.\d+|\.[A-Za-z_][\w-]*)*")
PART = re.compile(r"\[?(\d+)\]?|([A-Za-z_][\w-]*)")


def apply_overrides(tree: Tree, arguments: Sequence[str]) -> None:
    """Writes ``key=value`` arguments into the tree; what is wrong with one goes to ``tree.problems``."""
    seen: dict[Path, str] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        where = f"argument {argument}"
        if not equals or not KEY.fullmatch(key.strip()):
            tree.problems.append(_no_assignment(argument))
            continue
        path = _path(key.strip())
        if path in seen:
            what = f"{dotted(path)}: is given twice, also as {seen[path]}"
            tree.problems.append(HalftuneError(what, where=where, remedy="keep one of them"))
            continue
        seen[path] = argument
        try:
            _set(tree, _through_lists(tree.values, path), text, Place(COMMAND_LINE, where))
            expand(tree)  # the next argument may reach into what this one wrote in short
        except ConfigError as error:
            tree.problems += error.problems


def _no_assignment(argument: str) -> HalftuneError:
    where = f"argument {argument}"
    if argument.endswith((".yaml", ".yml")):
        return HalftuneError("a recipe is named with --config", where=where, remedy=f"--config {argument}")
    if argument.startswith("-"):
        return HalftuneError("unknown option", where=where, remedy="values are changed with section.key=value")
    remedy = "for example training.learning_rate=1e-4 (no spaces around =)"
    return HalftuneError("is not of the form section.key=value", where=where, remedy=remedy)


def _path(key: str) -> Path:
    return tuple(int(number) if number else name for number, name in PART.findall(key))


def _through_lists(values: Any, path: Path) -> Path:
    """``data.train.samples`` means the only entry of ``data.train`` where there is one only."""
    whole: list[str | int] = []
    for part in path:
        if isinstance(values, list) and len(values) == 1 and isinstance(part, str):
            whole.append(0)
            values = values[0]
        whole.append(part)
        values = child(values, part)
    return tuple(whole)


def _set(tree: Tree, path: Path, text: str, place: Place) -> None:
    """Puts one value in its place; sections on the way there are made.

    Raises:
        ConfigError: the value is no YAML, or something on the way is neither a section nor a list.
    """
    holder: Any = tree.values
    for depth, part in enumerate(path[:-1]):
        inner = _entry(holder, part, path[:depth], place)
        if inner is None:
            inner = holder[part] = {}
            tree.places.setdefault(path[: depth + 1], place)
        holder = inner
    last = path[-1]
    if isinstance(last, int) or not isinstance(holder, dict):
        _entry(holder, last, path[:-1], place)  # says what is wrong where it is no entry
    holder[last] = parse_value(text, tree, path, place)


def _entry(holder: Any, part: str | int, path: Path, place: Place) -> Any:
    if isinstance(part, int):
        if isinstance(holder, list) and part < len(holder):
            return holder[part]
        size = f"has {len(holder)} entries, counted from 0" if isinstance(holder, list) else "is not a list"
        raise ConfigError(f"{dotted(path)} {size}", where=place.where, remedy="set the whole list")
    if isinstance(holder, dict):
        return holder.get(part)
    kind = "a list" if isinstance(holder, list) else f"{holder!r}"
    remedy = f"name an entry: {dotted(path)}[0].{part}" if kind == "a list" else "set the whole value"
    raise ConfigError(f"{dotted(path)} is {kind}, not a section", where=place.where, remedy=remedy)
