"""Overrides on the command line (``training.learning_rate=1e-4``), short forms, and spellings of other tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from halftune.config.reading.yaml_source import Place, Tree, parse_value
from halftune.config.sections import LISTED, TYPED
from halftune.config.shape import ROOT, KeyPath, Shape, child, dotted, field_shape
from halftune.core.errors import ConfigError, HalftuneError

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
        remedy = "keep one, or set precision: auto"
        tree.problems.append(tree.problem(second.path, what, remedy, code="config.keys_conflict"))
        return {COMPUTE}
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
        tree.problems.append(tree.problem(source.path, what, "keep one of them", code="config.keys_conflict"))
        return {COMPUTE}
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
        tree.problems.append(tree.problem(pure.path, what, "keep one of them", code="config.keys_conflict"))
        return {TRAINABLE}
    _put(tree, precision, TRAINABLE, "bf16", pure)
    return set()


def _put(tree: Tree, precision: dict[str, Any], path: KeyPath, word: str, source: Spelling) -> None:
    precision[str(path[-1])] = word
    tree.places[path] = Place(f"{source.place.origin} ({source})", source.place.where)
    tree.written[path] = source.path


def expand(tree: Tree) -> None:
    """Expand every short form of the tree in place; ``tree.written`` records the original paths."""
    tree.values = _expand(tree, tree.values, ROOT, ())


def _expand(tree: Tree, value: Any, shape: Shape, path: KeyPath) -> Any:
    if LISTED in shape.metadata and isinstance(value, str | dict if shape.sections else str):
        _move_down(tree, path)
        value = [value]
    if not shape.sections or (shape.many and not isinstance(value, list)):
        return value
    if shape.many:
        one = Shape(shape.annotation, (), shape.sections, False, False)
        return [_expand(tree, item, one, (*path, index)) for index, item in enumerate(value)]
    value = _section(tree, value, shape, path)
    section = shape.section(value)
    if section is None or not isinstance(value, dict):
        return value
    fields = section.model_fields
    return {
        key: _expand(tree, inner, field_shape(fields[key]), (*path, key)) if key in fields else inner
        for key, inner in value.items()
    }


def _section(tree: Tree, value: Any, shape: Shape, path: KeyPath) -> Any:
    """Expand a single word to its section, and a union's section without a type to the default type."""
    typed = TYPED in shape.metadata
    if typed and isinstance(value, dict) and "type" not in value:
        return _with_type(value, shape)
    if typed and isinstance(value, str):
        word = "type"
    else:
        word = next(iter(shape.sections.values())).word if len(shape.sections) == 1 else None
    if word is None or not isinstance(value, str | bool | int | float):
        return value
    tree.written[(*path, word)] = path
    return {word: value}


def _with_type(value: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """A section with the type that is the default, if one is."""
    for name, section in shape.sections.items():
        if not section.model_fields["type"].is_required():
            return {"type": name, **value}
    return value


def _move_down(tree: Tree, path: KeyPath) -> None:
    """Move the places below ``path`` to entry 0 of a list."""
    below = {known: place for known, place in tree.places.items() if known[: len(path)] == path and known != path}
    for known in below:
        del tree.places[known]
    for known, place in below.items():
        tree.places[(*path, 0, *known[len(path) :])] = place
    tree.written[(*path, 0)] = path


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
