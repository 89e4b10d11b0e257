"""The values of a recipe with their places, and paths to them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from halftune.core.errors import HalftuneError

KeyPath = tuple[str | int, ...]
"""The place of a value: ``("data", "train", 0, "path")``."""
DEFAULT = "default"
_PART = re.compile(r"\[?(\d+)\]?|([A-Za-z_][\w-]*)")


def child(values: Any, *path: str | int) -> Any:
    """Return the value at a path of keys and indices; None if there is none."""
    for part in path:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def dotted(path: KeyPath) -> str:
    """Format a path as ``data.train[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def key_path(text: str) -> KeyPath:
    """Read a path, such as ``data.train[0].path`` or ``data.train.0.path``."""
    return tuple(int(number) if number else name for number, name in _PART.findall(text))


def related(one: KeyPath, other: KeyPath) -> bool:
    """Whether two paths are equal, or one contains the other."""
    return one[: len(other)] == other[: len(one)]


class Place(NamedTuple):
    """The place of a value: ``origin`` for reports, ``where`` for errors."""

    origin: str
    where: str


class KeyProblem(HalftuneError):
    """An error in the value at ``key``, a path of the schema; ``meant`` is the key that a misspelt one stands for."""

    def __init__(self, key: KeyPath, what: str, *, code: str, where: str, remedy: str, meant: KeyPath = ()) -> None:
        super().__init__(what, code=code, where=where, remedy=remedy)
        self.key, self.meant = key, meant


@dataclass
class Tree:
    """Plain values with the place of each key and list entry.

    Attributes:
        label: the file name as given by the user.
        values: dicts, lists, text, numbers, booleans and None.
        places: path → place of the key or entry.
        problems: errors found while reading, which does not stop.
        written: path → the user's shorter path (``precision.compute`` → ``precision``).
    """

    label: str
    values: Any = None
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[HalftuneError] = field(default_factory=list)
    written: dict[KeyPath, KeyPath] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Return the place of a path or of its nearest parent."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(f"{self.label}:1", f"{self.label}:1")

    def shown(self, path: KeyPath) -> str:
        """Return the dotted key as the user wrote it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.written:
                return self.shown((*self.written[path[:end]], *path[end:]))
        return dotted(path)

    def origin(self, path: KeyPath) -> str:
        """Return where a value was set: ``file:line``, ``command line`` or ``default``."""
        section = child(self.values, *path[:-1])
        return self.place(path).origin if isinstance(section, dict) and path[-1] in section else DEFAULT

    def forget(self, path: KeyPath) -> None:
        """Remove the places and original paths at and below a path."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        for known in [known for known in self.written if known[: len(path)] == path != known]:
            del self.written[known]

    def put(self, path: KeyPath, value: Tree) -> None:
        """Replace the value at a path, whose section exists; ``value`` has places for this path."""
        self.forget(path)
        self.places |= value.places
        self.problems += value.problems
        child(self.values, *path[:-1])[path[-1]] = value.values

    def move_down(self, path: KeyPath) -> None:
        """Move the places below a path to entry 0 of a list there."""
        below = [known for known in self.places if known[: len(path)] == path != known]
        moved = {(*path, 0, *known[len(path) :]): self.places.pop(known) for known in below}
        self.places |= moved
        self.written[(*path, 0)] = path

    def problem(self, path: KeyPath, what: str, remedy: str = "", *, code: str, meant: KeyPath = ()) -> KeyProblem:
        """Return an error about the value at a path; ``meant`` is as in ``KeyProblem``."""
        what, where = f"{self.shown(path)}: {what}", self.place(path).where
        return KeyProblem(path, what, code=code, where=where, remedy=remedy, meant=meant)
