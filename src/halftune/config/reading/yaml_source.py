"""Reads YAML into plain values and remembers the line of every key and list entry.

Plain scalars are read as YAML 1.2 and people mean them: ``1e-4`` is a number; ``yes``, ``no``, ``on``, ``off`` are text
(a flag then asks for ``true`` or ``false``), and so are dates, ``010``, ``1:30`` and what is no finite number.
"""

from __future__ import annotations

import errno
import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from halftune.config.reading.yaml_errors import syntax_error
from halftune.config.shape import Path, dotted
from halftune.config.shipped import listed
from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.files import read_limited

MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 17, 40, 10_000
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
HEX = re.compile(r"0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
WORDS: dict[str, Any] = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULLS = ("", "~", "null", "Null", "NULL")
_DEEP = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH + 1}}}")
TAG = "tag:yaml.org,2002:"


class Place(NamedTuple):
    """Where a value was written: for the origin of a value, and for an error."""

    origin: str
    where: str


class KeyProblem(HalftuneError):
    """Something wrong with the value at ``key``, a path of the schema."""

    def __init__(self, key: Path, what: str, *, where: str, remedy: str) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.key = key


@dataclass
class Tree:
    """Plain values with the place of each key and list entry.

    Attributes:
        label: the file as the user named it.
        values: dicts, lists, text, numbers, booleans and None.
        places: path → place of the key or entry.
        problems: what was wrong while reading; reading goes on.
        written: path → the shorter path that the user wrote it under (``precision.compute`` → ``precision``).
    """

    label: str
    values: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[HalftuneError] = field(default_factory=list)
    written: dict[Path, Path] = field(default_factory=dict)

    def place(self, path: Path) -> Place:
        """The place of a path or of the nearest key above it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(f"{self.label}:1", f"{self.label}:1")

    def shown(self, path: Path) -> str:
        """The dotted key as the user wrote it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.written:
                return self.shown((*self.written[path[:end]], *path[end:]))
        return dotted(path)

    def forget(self, path: Path) -> None:
        """Drops the places at and below a path, and how what stood there was spelt."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        for known in [known for known in self.written if known[: len(path)] == path and known != path]:
            del self.written[known]

    def problem(self, path: Path, what: str, remedy: str = "") -> KeyProblem:
        """An error about the value at a path."""
        return KeyProblem(path, f"{self.shown(path)}: {what}", where=self.place(path).where, remedy=remedy)


def read_text(path: FilePath) -> str:
    """The file as text.

    Raises:
        ConfigError: it is missing, a folder, no UTF-8, empty, or far too large to be a configuration.
    """
    label = str(path)
    try:
        raw = read_limited(path, MAX_BYTES)
    except FileNotFoundError:
        if path.is_symlink():
            what = f"is a link to {path.readlink()}, which is not there"
            raise ConfigError(what, where=label, remedy="mend the link") from None
        raise ConfigError("no such file", where=label, remedy=_neighbours(path)) from None
    except IsADirectoryError:
        raise ConfigError("is a folder, not a YAML file", where=label, remedy=_recipes_in(path)) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise ConfigError(f"{error.strerror}, too many for a recipe", where=label, remedy="is it data?") from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot be read: {reason}", where=label) from None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError("is UTF-16", where=label, remedy="save it as UTF-8")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8: byte 0x{raw[error.start]:02x}"
        raise ConfigError(what, where=f"{label}:{line}", remedy="save it as UTF-8") from None


def _neighbours(path: FilePath) -> str:
    from difflib import get_close_matches

    folder = path.parent
    names = [p.name for p in folder.glob("*.y*ml")][:1000] if folder.is_dir() else []
    shipped = f"halftune brings {listed()}"
    if not folder.is_dir():
        return f"there is no folder {folder} either; {shipped}"
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"did you mean {folder / close[0]}?" if close else f"check the path; {shipped}"


def _recipes_in(folder: FilePath) -> str:
    names = sorted(path.name for path in folder.glob("*.y*ml"))
    return f"it holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else "name the file"


def parse(text: str, label: str) -> Tree:
    """Values and places of a YAML text.

    Raises:
        ConfigError: the text is not one YAML mapping.
    """
    tree = Tree(label)
    node = _compose(text, label)
    breaks = [match.start() for match in re.finditer("\n", text)]

    def line_of(found: Node) -> int:
        """The line as editors count; YAML 1.1 breaks lines at U+0085 and U+2028 too."""
        return bisect_left(breaks, found.start_mark.index) + 1

    if node is None:
        raise ConfigError("is empty", where=label, remedy="start from configs/quickstart.yaml")
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else "a single value"
        line = line_of(node)
        remedy = "a recipe is made of 'key: value' lines (a space after the colon): model, data, training …"
        raise ConfigError(f"is {kind}, not a set of keys", where=f"{label}:{line}", remedy=remedy)
    _Reader(tree, line_of, lambda line: Place(f"{label}:{line}", f"{label}:{line}")).read_root(node)
    return tree


def parse_value(text: str, tree: Tree, path: Path, place: Place) -> Any:
    """One value of the command line, as YAML would read it; its places replace those that ``tree`` has there.

    Raises:
        ConfigError: it is not valid YAML.
    """
    try:
        node = _compose(text, "")
    except ConfigError as error:
        first = error.problems[0]
        raise ConfigError(f"{dotted(path)}: {first.what}", where=place.where, remedy=first.remedy) from None
    tree.forget(path)
    tree.places[path] = place
    if node is None:
        return None
    return _Reader(tree, lambda node: 0, lambda line: place).read(node, path, 0)


def _compose(text: str, label: str) -> Node | None:
    if _DEEP.search(text):  # the parser takes a second to give up on what no recipe holds
        raise ConfigError([syntax_error(RecursionError(), text, label)])
    try:
        loader = yaml.SafeLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([syntax_error(error, text, label)]) from None


class _Reader:
    """Turns nodes into values; writes places and problems into the tree."""

    def __init__(self, tree: Tree, line: Callable[[Node], int], place: Callable[[int], Place]) -> None:
        self._tree, self._line, self._place, self._count = tree, line, place, 0

    def read_root(self, node: MappingNode) -> None:
        self._tree.values = self.read(node, (), 0)

    def read(self, node: Node, path: Path, depth: int) -> Any:
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_VALUES:
            what = (
                "is nested too deeply"
                if depth > MAX_DEPTH
                else f"holds more than {MAX_VALUES:,} values, aliases written out, too many"
            )
            where = self._place(self._line(node)).where
            raise ConfigError(f"{what} for a configuration", where=where, remedy="is this the right file?")
        if isinstance(node, MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            self._known_tag(node, path, "seq")
            values = []
            for index, item in enumerate(node.value):
                self._tree.places[(*path, index)] = self._place(self._line(item))
                values.append(self.read(item, (*path, index), depth + 1))
            return values
        return self._scalar(node, path)

    def _mapping(self, node: MappingNode, path: Path, depth: int) -> dict[str, Any]:
        self._known_tag(node, path, "map")
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = self._line(key_node)
            if not isinstance(key_node, ScalarNode):
                self._problem(line, "a key must be a plain word", "put text with brackets in quotes")
                continue
            key = key_node.value
            if key_node.tag == f"{TAG}merge":
                for name, value in self._merged(value_node, path, depth):
                    values.setdefault(name, value)
                continue
            if key in lines:
                what = f"{dotted((*path, key))}: is written twice, here and in line {lines[key]}"
                self._problem(line, what, "keep one of them")
                continue
            lines[key] = line
            if key in values:  # a merged value gives way to the one written here
                self._tree.forget((*path, key))
            self._tree.places[(*path, key)] = self._place(line)
            values[key] = self.read(value_node, (*path, key), depth + 1)
        return values

    def _merged(self, node: Node, path: Path, depth: int) -> list[tuple[str, Any]]:
        """Entries of ``<<: *anchor``; explicit keys win over them, whichever comes first."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        found: list[tuple[str, Any]] = []
        for each in nodes:
            if isinstance(each, MappingNode):
                kept = dict(self._tree.places)
                found += self.read(each, path, depth + 1).items()
                self._tree.places.update(kept)
            else:
                self._problem(self._line(each), "<<: takes a section (*name)", "name an anchor of a section")
        return found

    def _scalar(self, node: Node, path: Path) -> Any:
        text = str(node.value)
        line = self._line(node)
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            self._problem(line, f"{dotted(path)}: holds half of a surrogate pair", "write the character itself")
            return ""
        if node.style in ("'", '"', "|", ">"):  # pyright: ignore[reportAttributeAccessIssue]
            return text
        kind = node.tag.removeprefix(TAG)
        if kind not in ("null", "bool", "int", "float", "str", "timestamp", "value", "merge"):
            self._problem(line, f"{dotted(path)}: the YAML tag {node.tag} is not allowed", "write a plain value")
            return text
        if kind == "str" and not FLOAT.fullmatch(text):  # also what `!!str` made text
            return text
        return scalar(text)

    def _known_tag(self, node: Node, path: Path, kind: str) -> None:
        if node.tag != f"{TAG}{kind}":
            line = self._line(node)
            self._problem(line, f"{dotted(path)}: the YAML tag {node.tag} is not allowed", "write a plain value")

    def _problem(self, line: int, what: str, remedy: str) -> None:
        self._tree.problems.append(HalftuneError(what, where=self._place(line).where, remedy=remedy))


def scalar(text: str) -> Any:
    """A plain (unquoted) scalar as a value."""
    if text in NULLS:
        return None
    if text in WORDS:
        return WORDS[text]
    if len(text) > 300:  # longer than any number that a float can hold
        return text
    if INT.fullmatch(text):
        return int(text.replace("_", ""))
    if HEX.fullmatch(text):
        return int(text, 16)
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text.replace("_", ""))):
        return number
    return text
