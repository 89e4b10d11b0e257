"""The usual spellings of precision (``bf16: true``, ``fp16: true``, ``pure_bf16: true``), translated into ours."""

from __future__ import annotations

from typing import Any, NamedTuple

from halftune.config.reading.overrides import COMMAND_LINE
from halftune.config.reading.yaml_source import Place, Tree
from halftune.config.shape import Path, dotted

FORMATS = {"bf16": "bf16", "fp16": "fp16", "pure_bf16": "bf16"}
COMPUTE: Path = ("precision", "compute")
TRAINABLE: Path = ("precision", "trainable")


class Spelling(NamedTuple):
    """One such key as it was found: ``true``, ``false``, ``auto`` or null."""

    path: Path
    value: Any
    place: Place

    @property
    def name(self) -> str:
        return str(self.path[-1])

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {_word(self)}"


def _word(spelling: Spelling) -> str:
    return str(spelling.value).lower()


def translate_spellings(tree: Tree) -> set[Path]:
    """Replaces those keys by the ``precision`` section, in place.

    ``true`` asks for that format; ``auto`` for ``precision: auto``; ``false`` alone, as elsewhere, for fp32.

    Returns:
        Paths about which there is nothing more to say, because an error was found there.
    """
    found = _take(tree)
    bad = [one for one in found if not (one.value is None or isinstance(one.value, bool) or one.value == "auto")]
    for one in bad:
        tree.problems.append(tree.problem(one.path, f"should be true, false or auto, not {one.value!r}"))
    found = _command_line_wins(tree, [one for one in found if one not in bad and one.value is not None])
    if not found:
        return {COMPUTE} if bad else set()
    precision = tree.values.setdefault("precision", {})
    if not isinstance(precision, dict):
        return set()
    chosen = [one for one in found if one.value is True]
    if len({FORMATS[one.name] for one in chosen}) > 1 or _torn(found, chosen):
        first, second = _pair(found, chosen)
        what = f"{_word(second)} excludes {first} ({first.place.origin})"
        tree.problems.append(tree.problem(second.path, what, "keep one, or write precision: auto"))
        return {COMPUTE}
    return _write(tree, precision, found, chosen)


def _torn(found: list[Spelling], chosen: list[Spelling]) -> bool:
    """``bf16: auto`` beside ``fp16: true``: which one it should be is anyone's guess."""
    autos = {one.name for one in found if one.value == "auto"}
    return bool(chosen) and bool(autos - {one.name for one in chosen}) and not autos <= {"pure_bf16"}


def _pair(found: list[Spelling], chosen: list[Spelling]) -> tuple[Spelling, Spelling]:
    first = chosen[0]
    others = [one for one in found if FORMATS[one.name] != FORMATS[first.name] and one.value]
    return first, (others or [one for one in found if one is not first])[0]


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
    """What the command line asks for replaces what the file asks for, in either spelling."""
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


def _write(tree: Tree, precision: dict[str, Any], found: list[Spelling], chosen: list[Spelling]) -> set[Path]:
    autos = [one for one in found if one.value == "auto"]
    source = (chosen or autos or found)[0]
    word = FORMATS[source.name] if chosen else "auto" if autos else "fp32"
    explicit = precision.get("compute")
    refused = {one.name for one in found if one.value is False}
    agree = explicit == word if source.value else explicit not in (*refused, "auto")
    if "compute" in precision and not agree:
        what = f"{_word(source)} contradicts precision: {explicit} ({tree.place(COMPUTE).origin})"
        tree.problems.append(tree.problem(source.path, what, "keep one of them"))
        return {COMPUTE}
    if "compute" not in precision:
        _put(tree, precision, COMPUTE, word, source)
    pure = next((one for one in chosen if one.name == "pure_bf16"), None)
    if pure is not None:
        if precision.get("trainable", "bf16") not in ("bf16", "auto"):
            what = f"{_word(pure)} contradicts precision.trainable: {precision['trainable']}"
            tree.problems.append(tree.problem(pure.path, what, "keep one of them"))
            return {TRAINABLE}
        _put(tree, precision, TRAINABLE, "bf16", pure)
    return set()


def _put(tree: Tree, precision: dict[str, Any], path: Path, word: str, source: Spelling) -> None:
    precision[str(path[-1])] = word
    tree.places[path] = Place(f"{source.place.origin} ({source})", source.place.where)
    tree.written[path] = source.path
