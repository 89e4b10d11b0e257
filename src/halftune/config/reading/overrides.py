"""Overrides on the command line (``training.learning_rate=1e-4``), and spellings of other tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from halftune.config.reading.yaml_source import parse_value
from halftune.config.shape import ROOT, Shape, written_out
from halftune.config.tree import KeyPath, Place, Tree, dotted, key_path
from halftune.core.errors import ConfigError

FORMATS = {"bf16": "bf16", "fp16": "fp16", "pure_bf16": "bf16"}
COMPUTE: KeyPath = ("precision", "compute")
TRAINABLE: KeyPath = ("precision", "trainable")


class Spelling(NamedTuple):
    """A key with another spelling: ``true``, ``false``, ``auto`` or null."""

    path: KeyPath
    value: Any
    place: Place

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def word(self) -> str:
        """The corresponding precision."""
        return "auto" if self.value == "auto" else FORMATS[self.name]

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {_word(self)}"


def _word(spelling: Spelling) -> str:
    return str(spelling.value).lower()


def translate_spellings(tree: Tree) -> set[KeyPath]:
    """Replace these keys by the ``precision`` section, in place.

    ``true`` selects this format, ``auto`` ``precision: auto``, and ``false`` alone fp32, as in other frameworks.

    Returns:
        Paths with errors, which need no further checks.
    """
    written = _take(tree)
    good = [one for one in written if isinstance(one.value, bool | None) or one.value == "auto"]
    for one in written:
        if one not in good:
            what = f"expected true, false or auto, got {one.value!r}"
            tree.problems.append(tree.problem(one.path, what, code="config.invalid_value"))
    found = _command_line_wins(tree, [one for one in good if one.value is not None])
    if not found:
        return set() if written == good else {COMPUTE}
    precision = tree.values.setdefault("precision", {})
    if not isinstance(precision, dict):
        return set()
    asked = {one.word: one for one in reversed(found) if one.value}
    if len(asked) > 1:
        first, second, *_ = reversed(asked.values())
        what = f"{_word(second)} conflicts with {first} ({first.place.origin})"
        return _conflict(tree, second, what, COMPUTE, "keep one, or set precision: auto")
    source = next(iter(asked.values()), found[0])
    return _write_compute(tree, precision, found, source) or _write_trainable(tree, precision, found)


def _take(tree: Tree) -> list[Spelling]:
    """Remove the spellings from the tree."""
    holders: tuple[tuple[KeyPath, Any], ...] = (((), tree.values), (("training",), tree.values.get("training")))
    return [
        Spelling((*path, name), holder.pop(name), tree.place((*path, name)))
        for path, holder in holders
        if isinstance(holder, dict)
        for name in FORMATS
        if name in holder
    ]


def _command_line_wins(tree: Tree, found: list[Spelling]) -> list[Spelling]:
    """Let the command line override the file, in either spelling."""
    given = [one for one in found if one.place.origin == COMMAND_LINE]
    precision = tree.values.get("precision")
    compute = tree.place(COMPUTE).origin if isinstance(precision, dict) and "compute" in precision else ""
    if compute == COMMAND_LINE and not given:
        return []
    if any(one.value for one in given):
        if compute not in ("", COMMAND_LINE):
            del precision["compute"]
        return given
    names = {one.name for one in given}
    return [one for one in found if one in given or one.name not in names]


def _write_compute(tree: Tree, precision: dict[str, Any], found: list[Spelling], source: Spelling) -> set[KeyPath]:
    """Set ``precision.compute``, or report that it is set to something else; returns it then."""
    word = source.word if source.value else "fp32"
    explicit = precision.get("compute")
    refused = {one.name for one in found if one.value is False}
    agree = explicit == word if source.value else explicit not in (*refused, "auto")
    if "compute" in precision and not agree:
        what = f"{_word(source)} contradicts precision: {explicit} ({tree.place(COMPUTE).origin})"
        return _conflict(tree, source, what, COMPUTE)
    if "compute" not in precision:
        _put(tree, precision, COMPUTE, word, source)
    return set()


def _write_trainable(tree: Tree, precision: dict[str, Any], found: list[Spelling]) -> set[KeyPath]:
    """Set ``precision.trainable`` for ``pure_bf16: true``, or report that it is set to something else."""
    pure = next((one for one in found if one.name == "pure_bf16" and one.value is True), None)
    if pure is None:
        return set()
    if precision.get("trainable", "bf16") not in ("bf16", "auto"):
        what = f"{_word(pure)} contradicts precision.trainable: {precision['trainable']}"
        return _conflict(tree, pure, what, TRAINABLE)
    _put(tree, precision, TRAINABLE, "bf16", pure)
    return set()


def _conflict(
    tree: Tree, spelling: Spelling, what: str, broken: KeyPath, remedy: str = "keep one of them"
) -> set[KeyPath]:
    tree.problems.append(tree.problem(spelling.path, what, remedy, code="config.keys_conflict"))
    return {broken}


def _put(tree: Tree, precision: dict[str, Any], path: KeyPath, word: str, source: Spelling) -> None:
    precision[str(path[-1])] = word
    tree.places[path] = Place(f"{source.place.origin} ({source})", source.place.where)
    tree.written[path] = source.path


COMMAND_LINE = "command line"
KEY = re.compile(r"[A-Za-z_][\w-]*(\[\d+\]|\.\d+|\.[A-Za-z_][\w-]*)*")


def apply_overrides(tree: Tree, arguments: Sequence[str]) -> None:
    """Apply ``key=value`` arguments to the tree; errors are added to ``tree.problems``."""
    seen: dict[KeyPath, str] = {}
    for argument in arguments:
        try:
            path, text = _assignment(argument)
            place = Place(COMMAND_LINE, f"argument {argument}")
            if path in seen:
                what = f"{dotted(path)}: duplicate override, also {seen[path]}"
                raise ConfigError(what, where=place.where, remedy="keep one of them", code="config.duplicate_key")
            seen[path] = argument
            _set(tree, path, text, place)
        except ConfigError as error:
            tree.problems += error.problems


def _assignment(argument: str) -> tuple[KeyPath, str]:
    """The key and the text of its value.

    Raises:
        ConfigError: the argument is not ``key=value``.
    """
    key, equals, text = argument.partition("=")
    where = f"argument {argument}"
    if equals and KEY.fullmatch(key.strip()):
        return key_path(key.strip()), text
    if argument.endswith((".yaml", ".yml")):
        what = "a recipe must be given with --config"
        raise ConfigError(what, where=where, remedy=f"use --config {argument}", code="cli.no_recipe")
    if argument.startswith("-"):
        remedy = "use section.key=value to change a value"
        raise ConfigError("unknown option", where=where, remedy=remedy, code="cli.unknown_option")
    remedy = "use for example training.learning_rate=1e-4 (no spaces around =)"
    raise ConfigError("expected section.key=value", where=where, remedy=remedy, code="config.bad_override")


def _set(tree: Tree, given: KeyPath, text: str, place: Place) -> None:
    """Set a value. Short forms on the way are written out, and missing sections made; a list with one entry needs no
    index: ``data.train.samples`` is ``data.train[0].samples``.

    Raises:
        ConfigError: the value is not valid YAML, or a value on the path is neither a section nor a list.
    """
    holder: Any = tree.values
    shape: Shape | None = ROOT
    path: KeyPath = ()
    rest = list(given)
    while True:
        part = rest.pop(0)
        inner = _entry(holder, part, path, place)
        shape, path = shape and shape.below(part, holder), (*path, part)
        if not rest:
            tree.put(path, parse_value(text, path, place))
            return
        if inner is None:
            inner = {}
            tree.places.setdefault(path, place)
        elif shape is not None:
            inner = written_out(tree, inner, shape, path)
        holder[part] = inner
        if isinstance(inner, list) and len(inner) == 1 and isinstance(rest[0], str):
            rest.insert(0, 0)
        holder = inner


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
