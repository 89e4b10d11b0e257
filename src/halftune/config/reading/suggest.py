"""Suggestions for unknown keys: similar spellings, keys of other sections, other frameworks' names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from halftune.config.sections import Section
from halftune.config.shape import shape_at, walk
from halftune.config.tree import KeyPath, dotted, key_path
from halftune.core.packaged import read_yaml

# Names too general to suggest another section.
GENERAL = {"type", "path", "split", "format", "enabled", "samples", "weight", "columns"}


Suggestion = tuple[str, KeyPath]
"""The remedy for an unknown key, and the key that was meant; empty if that is not certain."""


def suggest_key(path: KeyPath, section: type[Section] | None) -> Suggestion:
    """Return the remedy for an unknown key at ``path`` in ``section``."""
    key, parent = str(path[-1]), path[:-1]
    plain = key.lower().replace("-", "_")
    siblings = list(section.model_fields) if section is not None else []
    if plain in siblings:
        return _mean((*parent, plain))
    if "." in key and shape_at(tuple(key.split("."))) is not None:
        return f"write it as a section: {key.replace('.', ': {', 1)}: …}}, or {key}=… on the command line", ()
    if known := _known_name(plain, path):
        return known
    if near := _near(plain, parent, siblings, _places()):
        return _mean(near)
    if not parent and 0 < len(siblings) < 12:
        return f"sections are {', '.join(siblings)}", ()
    return f"keys of {dotted(parent)} are {', '.join(siblings)}" if siblings else "", ()


def _known_name(key: str, path: KeyPath) -> Suggestion | None:
    """The suggestion for a key of another section, of a later version or of another tool; None if it is none of
    these."""
    parent = path[:-1]
    if tags := _tags(parent, key):
        return f"{key} is a key of {dotted(parent)}.type {' and '.join(tags)}", ()
    names = _other_names()
    if key in names.remedies:
        return names.remedies[key], ()
    scoped = dotted((*parent, key))
    if parent and scoped in names.keys:
        return _mean(key_path(names.keys[scoped]))
    elsewhere = [place for place in _places().get(key, []) if place != path]
    if elsewhere and key not in GENERAL:
        return _mean(*elsewhere[:2])
    return _mean(key_path(names.keys[key])) if key in names.keys else None


def key_of(name: str) -> str | None:
    """Return the full key for a key's name, or for another tool's name of it; None if ambiguous or unknown."""
    plain = name.lower().replace("-", "_")
    if "." in plain:
        return plain if shape_at(tuple(plain.split("."))) is not None else None
    places = _places().get(plain, [])
    if places and plain not in GENERAL:
        return dotted(places[0])
    return _other_names().keys.get(plain)


@dataclass(frozen=True)
class OtherNames:
    """What other tools call our keys and words, from ``other_names.yaml``.

    Attributes:
        keys: their key → ours.
        remedies: their key → remedy.
        words: their word → ours.
        remedies_of_words: a word of a list → their word → remedy.
    """

    keys: dict[str, str]
    remedies: dict[str, str]
    words: dict[str, str]
    remedies_of_words: dict[str, dict[str, str]]


@cache
def _other_names() -> OtherNames:
    read = read_yaml("halftune.config.reading", "other_names.yaml")
    by_word = {word: _reversed(remedies) for word, remedies in read.pop("remedies_of_words").items()}
    return OtherNames(**{name: _reversed(table) for name, table in read.items()}, remedies_of_words=by_word)


def _reversed(table: dict[str, list[str]]) -> dict[str, str]:
    return {theirs: ours for ours, names in table.items() for theirs in names}


def suggest_word(value: object, known: Iterable[object]) -> tuple[str, str]:
    """Return the remedy for an unknown word of a closed list, and the word that was meant; empty if there is none."""
    words = [str(word) for word in known]
    text, names = str(value).lower(), _other_names()
    for word in words:
        if remedy := names.remedies_of_words.get(word, {}).get(text):
            return remedy, ""
    ours = names.words.get(re.sub(r"[-_ ]+", "_", text))
    near = [word for word in words if word in (text, ours)] or get_close_matches(text, words, n=1, cutoff=0.6)
    return (f"did you mean {near[0]}?", near[0]) if near else ("", "")


def _tags(parent: KeyPath, key: str) -> list[str]:
    """The other types of a tagged section (adapter, method) with this key."""
    shape = shape_at(parent)
    sections = shape.sections if shape is not None and len(shape.sections) > 1 else {}
    return [tag for tag, section in sections.items() if key in section.model_fields]


def _near(key: str, parent: KeyPath, siblings: list[str], places: dict[str, list[KeyPath]]) -> KeyPath | None:
    """A similar key: in the same section, then a very similar one anywhere, then a less similar one in the section."""
    if near := get_close_matches(key, siblings, n=1, cutoff=0.7):
        return (*parent, near[0])
    if near := get_close_matches(key, places, n=1, cutoff=0.8):
        return places[near[0]][0]
    near = get_close_matches(key, siblings, n=1, cutoff=0.55)
    return (*parent, near[0]) if near else None


def _mean(*paths: KeyPath) -> Suggestion:
    return f"did you mean {' or '.join(map(dotted, paths))}?", paths[0] if len(paths) == 1 else ()


def _places() -> dict[str, list[KeyPath]]:
    """Leaf name → its paths in the schema, with index 0 for list entries."""
    places: dict[str, list[KeyPath]] = {}
    for path in dict.fromkeys(path for path, *_ in walk()):
        places.setdefault(str(path[-1]), []).append(path)
    return places
