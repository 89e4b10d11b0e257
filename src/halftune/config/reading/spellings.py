"""Translates other spellings of precision (``bf16: true``, ``fp16: true``, ``pure_bf16: true``)."""

from __future__ import annotations

from typing import Any, NamedTuple

from halftune.config.reading.overrides import COMMAND_LINE
from halftune.config.reading.yaml_source import Place, Tree
from halftune.config.shape import KeyPath, dotted

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
    found = _take(tree)
    bad = [one for one in found if not (one.value is None or isinstance(one.value, bool) or one.value == "auto")]
    for one in bad:
        tree.problems.append(
            tree.problem(one.path, f"expected true, false or auto, got {one.value!r}", code="config.invalid_value")
        )
    found = _command_line_wins(tree, [one for one in found if one not in bad and one.value is not None])
    if not found:
        return {COMPUTE} if bad else set()
    precision = tree.values.setdefault("precision", {})
    if not isinstance(precision, dict):
        return set()
    asked = {one.word: one for one in reversed(found) if one.value}
    if len(asked) > 1:
        first, second, *_ = reversed(asked.values())
        what = f"{_word(second)} conflicts with {first} ({first.place.origin})"
        tree.problems.append(
            tree.problem(second.path, what, "keep one, or set precision: auto", code="config.keys_conflict")
        )
        return {COMPUTE}
    return _write(tree, precision, found, next(iter(asked.values()), found[0]))


def _take(tree: Tree) -> list[Spelling]:
    found = []
    for holder_path in ((), ("training",)):
        holder = tree.values if not holder_path else tree.values.get("training")
        if isinstance(holder, dict):
            for name in FORMATS:
                if name in holder:
                    path = (*holder_path, name)
                    found.append(Spelling(path, holder.pop(name), tree.place(path)))
    return found


def _command_line_wins(tree: Tree, found: list[Spelling]) -> list[Spelling]:
    """Let the command line override the file, in either spelling."""
    given = [one for one in found if one.place.origin == COMMAND_LINE]
    precision = tree.values.get("precision")
    asked = isinstance(precision, dict) and "compute" in precision
    if asked and not given and tree.place(COMPUTE).origin == COMMAND_LINE:
        return []
    if any(one.value for one in given):
        if asked and isinstance(precision, dict) and tree.place(COMPUTE).origin != COMMAND_LINE:
            del precision["compute"]
        return given
    return [one for one in found if one in given or one.name not in {other.name for other in given}]


def _write(tree: Tree, precision: dict[str, Any], found: list[Spelling], source: Spelling) -> set[KeyPath]:
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
    pure = next((one for one in found if one.name == "pure_bf16" and one.value is True), None)
    if pure is not None:
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
