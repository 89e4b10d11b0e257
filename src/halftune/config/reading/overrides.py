"""Overrides on the command line: ``training.learning_rate=1e-4``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from halftune.config.reading.shorthand import expand
from halftune.config.reading.yaml_source import Place, Tree, parse_value
from halftune.config.shape import KeyPath, child, dotted
from halftune.core.errors import ConfigError, HalftuneError

COMMAND_LINE = "command line"
KEY = re.compile(r"[A-Za-z_][\w-]*(\[\d+\]|\.\d+|\.[A-Za-z_][\w-]*)*")
PART = re.compile(r"\[?(\d+)\]?|([A-Za-z_][\w-]*)")


def apply_overrides(tree: Tree, arguments: Sequence[str]) -> None:
    """Apply ``key=value`` arguments to the tree; errors are added to ``tree.problems``."""
    seen: dict[KeyPath, str] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        where = f"argument {argument}"
        if not equals or not KEY.fullmatch(key.strip()):
            tree.problems.append(_no_assignment(argument))
            continue
        path = _path(key.strip())
        if path in seen:
            what = f"{dotted(path)}: duplicate override, also {seen[path]}"
            tree.problems.append(
                HalftuneError(what, where=where, remedy="keep one of them", code="config.duplicate_key")
            )
            continue
        seen[path] = argument
        try:
            _set(tree, _through_lists(tree.values, path), text, Place(COMMAND_LINE, where))
            expand(tree)  # the next argument may change a key of an expanded short form
        except ConfigError as error:
            tree.problems += error.problems


def _no_assignment(argument: str) -> HalftuneError:
    where = f"argument {argument}"
    if argument.endswith((".yaml", ".yml")):
        what = "a recipe must be given with --config"
        return HalftuneError(what, where=where, remedy=f"use --config {argument}", code="cli.no_recipe")
    if argument.startswith("-"):
        return HalftuneError(
            "unknown option", where=where, remedy="use section.key=value to change a value", code="cli.unknown_option"
        )
    remedy = "use for example training.learning_rate=1e-4 (no spaces around =)"
    return HalftuneError("expected section.key=value", where=where, remedy=remedy, code="config.bad_override")


def _path(key: str) -> KeyPath:
    return tuple(int(number) if number else name for number, name in PART.findall(key))


def _through_lists(values: Any, path: KeyPath) -> KeyPath:
    """Insert index 0 for lists with one entry: ``data.train.samples`` is ``data.train[0].samples``."""
    whole: list[str | int] = []
    for part in path:
        if isinstance(values, list) and len(values) == 1 and isinstance(part, str):
            whole.append(0)
            values = values[0]
        whole.append(part)
        values = child(values, part)
    return tuple(whole)


def _set(tree: Tree, path: KeyPath, text: str, place: Place) -> None:
    """Set a value; missing sections on the path are created.

    Raises:
        ConfigError: the value is not valid YAML, or a value on the path is neither a section nor a list.
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
        _entry(holder, last, path[:-1], place)  # raises if there is no such entry
    holder[last] = parse_value(text, tree, path, place)


def _entry(holder: Any, part: str | int, path: KeyPath, place: Place) -> Any:
    if isinstance(part, int):
        if isinstance(holder, list) and part < len(holder):
            return holder[part]
        size = f"has {len(holder)} entries, counted from 0" if isinstance(holder, list) else "is not a list"
        what = f"{dotted(path)} {size}"
        raise ConfigError(what, where=place.where, remedy="set the whole list", code="config.bad_override")
    if isinstance(holder, dict):
        return holder.get(part)
    kind = "a list" if isinstance(holder, list) else f"{holder!r}"
    remedy = f"use an index: {dotted(path)}[0].{part}" if kind == "a list" else "set the whole value"
    what = f"{dotted(path)} is {kind}, not a section"
    raise ConfigError(what, where=place.where, remedy=remedy, code="config.bad_override")
