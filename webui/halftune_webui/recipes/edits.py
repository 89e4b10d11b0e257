"""What a change in the form does to the recipe's text."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, get_origin

from halftune.config.reading.yaml_source import parse, scalar
from halftune.config.shape import Shape, accepts, choices, shape_at
from halftune.config.tree import KeyPath
from halftune.core.errors import ConfigError
from halftune_webui.recipes.dependencies import without_needless
from halftune_webui.recipes.form import display, takes_list
from halftune_webui.recipes.yaml_edit import ABSENT, child_at, read, set_value
from halftune_webui.settings import Settings

_PART = re.compile(r"([a-z0-9_]+)|\[(\d{1,4})\]")


def edited(text: str, edits: list[Any], settings: Settings) -> str:
    """The recipe after what was done in the form, in order; what the form cannot have sent does nothing."""
    for edit in edits:
        with suppress(ConfigError):  # the text is no recipe meanwhile: the answer says what is wrong with it
            match edit:
                case {"op": "set", "field": str(field), "value": (str() | bool() | list()) as value}:
                    changed = change(text, field, value)
                    if field.startswith("model."):  # another model needs no training of the one before
                        changed = without_needless(text, changed, settings)
                    text = changed
                case {"op": "add", "field": str(field)}:
                    text = add_entry(text, field)
                case {"op": "remove", "field": str(field)}:
                    text = remove_entry(text, field)
    return text


def path_of(dotted: str) -> KeyPath:
    """``data.train[0].path`` as a path.

    Raises:
        ConfigError: the configuration has no such key.
    """
    path = tuple(int(index) if index else name for name, index in _PART.findall(dotted))
    if not path or shape_at(path) is None:
        raise ConfigError("there is no such field", where=dotted, code="core.unknown_name")
    return path


def change(text: str, dotted: str, written: str | bool | list[str]) -> str:
    """The recipe with what was written into a field; an empty field goes back to its default.

    Raises:
        ConfigError: there is no such field, or the text is no YAML mapping.
    """
    path = path_of(dotted)
    if path[-1] == "type":
        return _switch(text, path, str(written))
    values = read(text).values
    shape = shape_at(path, values) or shape_at(path)
    assert shape is not None
    value = _value(shape, written)
    if value is ABSENT and child_at(values, path) is ABSENT:
        return text
    if value is ABSENT and _is_last_key(values, path):
        value = ""  # an entry stays until it is removed
    return set_value(text, path, value)


def _is_last_key(values: Any, path: KeyPath) -> bool:
    """Whether a path is the only key of a list's entry."""
    entry = child_at(values, path[:-1])
    return len(path) > 1 and isinstance(path[-2], int) and isinstance(entry, dict) and len(entry) == 1


def add_entry(text: str, dotted: str) -> str:
    """The recipe with one more, empty entry in a list of sections."""
    path = path_of(dotted)
    known = child_at(read(text).values, path)
    count = len(known) if isinstance(known, list) else 0
    shape = shape_at(path)
    assert shape is not None
    section = next(iter(shape.sections.values()))
    required = {name: "" for name, field in section.model_fields.items() if field.is_required()}
    return set_value(text, (*path, count), required) if count else set_value(text, path, [required])


def remove_entry(text: str, dotted: str) -> str:
    """The recipe without one entry of a list."""
    path = path_of(dotted)
    entries = child_at(read(text).values, path[:-1])
    whole = path[:-1] if isinstance(entries, list) and len(entries) == 1 else path
    return set_value(text, whole, ABSENT)


def _switch(text: str, path: KeyPath, word: str) -> str:
    """Another variant of a tagged union: keys that it does not know go."""
    section = path[:-1]
    shape = shape_at(section)
    assert shape is not None
    variant = shape.sections.get(word)
    known = child_at(read(text).values, section)
    if variant is not None and isinstance(known, dict):
        for name in known:
            if name != "type" and name not in variant.model_fields:
                text = set_value(text, (*section, name), ABSENT)
    return set_value(text, path, word)


def _value(shape: Shape, written: str | bool | list[str]) -> Any:
    """The value that a person means by what stands in the field; what fits no type stays text, for the check to say."""
    if not isinstance(written, str):
        return written if written != [] else ABSENT
    lines = list(filter(None, map(str.strip, written.splitlines())))
    if not lines:
        return ABSENT
    if get_origin(shape.annotation) is dict:
        return _pairs(lines)
    if takes_list(shape):
        one = len(lines) == 1 and accepts(shape, str)
        return lines[0] if one or lines[0] in choices(shape) else lines
    return _scalar(shape, written.strip())


def _scalar(shape: Shape, text: str) -> Any:
    words = {display(word): word for word in choices(shape)}
    if text in words:
        return words[text]
    if accepts(shape, bool) and text in ("true", "false"):
        return text == "true"
    return scalar(text) if accepts(shape, int) or accepts(shape, float) else text


def _pairs(lines: list[str]) -> Any:
    """``name: value`` lines as a mapping."""
    try:
        return dict(parse("\n".join(lines), "field").values)
    except ConfigError:
        return " ".join(lines)
