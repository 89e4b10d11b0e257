"""Expands short forms: ``precision: bf16`` becomes a section, a single data source a list."""

from __future__ import annotations

from typing import Any

from halftune.config.reading.yaml_source import Tree
from halftune.config.section import LISTED, TYPED
from halftune.config.shape import ROOT, KeyPath, Shape, field_shape


def expand(tree: Tree) -> None:
    """Expand every short form of the tree in place; ``tree.written`` records the original paths."""
    tree.values = _expand(tree, tree.values, ROOT, ())


def _expand(tree: Tree, value: Any, shape: Shape, path: KeyPath) -> Any:
    if not shape.sections:
        if LISTED in shape.metadata and isinstance(value, str):
            tree.written[(*path, 0)] = path
            return [value]
        return value
    if shape.many:
        if LISTED in shape.metadata and isinstance(value, str | dict):
            _move_down(tree, path)
            value = [value]
        if not isinstance(value, list):
            return value
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
    if TYPED in shape.metadata and isinstance(value, dict) and "type" not in value:
        usual = [name for name, section in shape.sections.items() if not section.model_fields["type"].is_required()]
        return {"type": usual[0], **value} if usual else value
    word = next(iter(shape.sections.values())).word if len(shape.sections) == 1 else None
    if TYPED in shape.metadata and isinstance(value, str):
        word = "type"
    if word is None or not isinstance(value, str | bool | int | float):
        return value
    tree.written[(*path, word)] = path
    return {word: value}


def _move_down(tree: Tree, path: KeyPath) -> None:
    """Move the places below ``path`` to entry 0 of a list."""
    below = {known: place for known, place in tree.places.items() if known[: len(path)] == path and known != path}
    for known in below:
        del tree.places[known]
    for known, place in below.items():
        tree.places[(*path, 0, *known[len(path) :])] = place
    tree.written[(*path, 0)] = path
