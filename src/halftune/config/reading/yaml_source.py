"""Reads YAML into plain values and records the line of every key and list entry, or explains its syntax error.

Plain scalars are read as in YAML 1.2: ``1e-4`` is a number; ``yes``, ``no``, ``on``, ``off`` are strings (a flag then
requires ``true`` or ``false``), and so are dates, ``010``, ``1:30`` and non-finite numbers.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml
from yaml.error import MarkedYAMLError, YAMLError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from halftune.config.recipes import recipes
from halftune.config.tree import KeyPath, Place, Tree, dotted
from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.files import read_limited


class Sentence(NamedTuple):
    """The message for parser errors that match ``pattern``; ``at_start``: report the construct's first line."""

    pattern: str
    what: str
    remedy: str
    at_start: bool = False


SENTENCES = (
    Sentence("expected a single document", "a second document starts here (---)", "use one recipe per file"),
    Sentence("expected '<document start>'", "text after a complete value", "check the file name"),
    Sentence("find expected ':'", "expected 'key: value'", "write a colon and a space after the key", True),
    Sentence("unexpected end of stream|unexpected document sep", "unclosed quote", "close it", True),
    Sentence("found '<scalar>'", "text after a closing quote", "put the whole value in one pair of quotes"),
    Sentence("parsing a flow", "unclosed bracket or brace, or missing comma", "close it with ] or }", True),
    Sentence("block mapping", "inconsistent indentation", "start the section's keys in one column"),
    Sentence("block collection", "inconsistent indentation of a list", "start its entries in one column"),
    Sentence("found undefined alias", "undefined alias (*name)", "define its anchor (&name) above, or quote it"),
    Sentence("found duplicate anchor", "duplicate anchor (&name)", "rename one of them"),
    Sentence("unknown escape", "unknown escape in double quotes", "use single quotes for strings with \\"),
    Sentence("undefined tag handle|unknown tag", "a YAML tag (!…) is not allowed here", "quote it"),
    Sentence("cannot start any token", "a value cannot start with this character", "put the value in quotes"),
    Sentence("expected alphabetic or numeric", "a name must follow & or *", "put the value in quotes"),
)


def syntax_error(error: YAMLError | RecursionError, text: str, label: str) -> HalftuneError:
    """Convert a parser's error to a readable one, with its line."""
    if isinstance(error, RecursionError):
        what = "nested too deeply for a configuration"
        return HalftuneError(what, where=label, remedy="check the file name", code="config.too_large")
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{int(error.character):04X} is not allowed in YAML"
        return HalftuneError(what, where=f"{label}:{line}", remedy="remove it", code="config.invalid_yaml")
    if not isinstance(error, MarkedYAMLError):
        return HalftuneError(f"invalid YAML: {error}", where=label, code="config.invalid_yaml")
    what, remedy, line = _explain(error, text)
    return HalftuneError(what, where=f"{label}:{line}", remedy=remedy, code="config.invalid_yaml")


def _explain(error: MarkedYAMLError, text: str) -> tuple[str, str, int]:
    """What is wrong, the remedy and the line."""
    said = f"{error.context or ''} {error.problem or ''}"
    mark, start = error.problem_mark, error.context_mark
    unknown = Sentence("", f"invalid YAML ({said.strip()})", "")
    _, what, remedy, at_start = next((one for one in SENTENCES if re.search(one.pattern, said)), unknown)
    chosen = start if at_start and start is not None else mark
    # lines as editors count them: YAML 1.1 breaks lines at U+0085 and U+2028 too
    line, end = (text.count("\n", 0, at.index) + 1 if at is not None else 1 for at in (chosen, mark))
    if (tab := _tab_near(text, line, end)) is not None:
        return "indentation with a tab", "use spaces", tab
    return _stray_colon(text, line) if "mapping values are not allowed" in said else (what, remedy, line)


def _stray_colon(text: str, line: int) -> tuple[str, str, int]:
    """The reason for an unexpected colon: a value with a colon, a wrong indentation, or a key without a space."""
    rows = text.split("\n")
    row = rows[line - 1]
    above = next((number for number in range(line - 1, 0, -1) if rows[number - 1].strip()), line)
    if len(re.findall(r":(?=\s|$)", row)) > 1 or above == line:
        return "a second colon in one line", "put text that holds ': ' in quotes", line
    if not re.search(r":(\s|$)", rows[above - 1]):
        return "expected 'key: value'", "write a colon and a space after the key", above
    remedy = f"line {above} has a value already: start both keys in the same column, or leave that value out"
    return "this key is indented deeper than the one above", remedy, line


def _tab_near(text: str, *lines: int) -> int | None:
    """The first of these lines that is indented with a tab."""
    rows = text.split("\n")
    for line in sorted(set(lines)):
        row = rows[line - 1] if line <= len(rows) else ""
        if "\t" in row[: len(row) - len(row.lstrip())]:
            return line
    return None


MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 17, 40, 10_000
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
HEX = re.compile(r"0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
WORDS: dict[str, Any] = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULLS = ("", "~", "null", "Null", "NULL")
_DEEP = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH + 1}}}")
TAG = "tag:yaml.org,2002:"


def read_text(path: FilePath, *, root: FilePath | None = None) -> str:
    """Read a recipe's text.

    Args:
        path: the file.
        root: an untrusted parent folder: symbolic links below it are not followed. Default: links are followed.

    Raises:
        ConfigError: it is missing, a folder, not UTF-8, too large for a recipe, or a link below ``root``.
    """
    label = str(path)
    try:
        raw = read_limited(path, MAX_BYTES, root=root)
    except FileNotFoundError:
        if path.is_symlink():
            what = f"broken symbolic link to {path.readlink()}"
            raise ConfigError(what, where=label, remedy="fix the symbolic link", code="core.broken_link") from None
        raise ConfigError("no such file", where=label, remedy=_neighbours(path), code="config.file_not_found") from None
    except IsADirectoryError:
        what = "expected a YAML file, got a folder"
        raise ConfigError(what, where=label, remedy=_recipes_in(path), code="config.not_a_file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            what = f"{error.strerror}, too large for a recipe"
            raise ConfigError(what, where=label, remedy="check the file name", code="config.too_large") from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read file: {reason}", where=label, code="core.unreadable") from None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError("expected UTF-8, got UTF-16", where=label, remedy="save it as UTF-8", code="core.not_utf8")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8: byte 0x{raw[error.start]:02x}"
        raise ConfigError(what, where=f"{label}:{line}", remedy="save it as UTF-8", code="core.not_utf8") from None


def _neighbours(path: FilePath) -> str:
    from difflib import get_close_matches

    folder = path.parent
    names = [p.name for p in folder.glob("*.y*ml")][:1000] if folder.is_dir() else []
    near = get_close_matches(path.stem, [one.stem for one in recipes().values()], n=1, cutoff=0.6)
    shipped = f"`halftune recipes` lists the shipped recipes{f', among them {near[0]}' if near else ''}"
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; {shipped}"
    close = get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"did you mean {folder / close[0]}?" if close else f"check the path; {shipped}"


def _recipes_in(folder: FilePath) -> str:
    names = sorted(path.name for path in folder.glob("*.y*ml"))
    return f"use one of {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else "use a file"


def parse(text: str, label: str) -> Tree:
    """Parse a YAML text into values and places.

    Raises:
        ConfigError: the text is not a single YAML mapping.
    """
    tree = Tree(label)
    node = _compose(text, label)

    def place(found: Node) -> Place:
        """The line as editors count; YAML 1.1 also breaks lines at U+0085 and U+2028."""
        where = f"{label}:{text.count(chr(10), 0, found.start_mark.index) + 1}"
        return Place(where, where)

    if node is None:
        raise ConfigError("empty file", where=label, remedy="start from configs/quickstart.yaml", code="config.empty")
    if not isinstance(node, MappingNode):
        what = f"expected a mapping, got {'a list' if isinstance(node, SequenceNode) else 'a single value'}"
        remedy = "write 'key: value' lines (with a space after the colon): model, data, training …"
        raise ConfigError(what, where=place(node).where, remedy=remedy, code="config.not_a_mapping")
    tree.values = _Reader(tree, place).read(node, ())
    return tree


def parse_value(text: str, path: KeyPath, place: Place) -> Tree:
    """Parse a value for ``path`` of the command line as YAML.

    Raises:
        ConfigError: it is not valid YAML.
    """
    try:
        node = _compose(text, "")
    except ConfigError as error:
        first = error.problems[0]
        what = f"{dotted(path)}: {first.what}"
        raise ConfigError(what, where=place.where, remedy=first.remedy, code=first.code) from None
    tree = Tree(place.where, places={path: place})
    tree.values = None if node is None else _Reader(tree, lambda _: place).read(node, path)
    return tree


def _compose(text: str, label: str) -> Node | None:
    if _DEEP.search(text):  # the parser would take a second to fail
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
    """Converts nodes to values; adds places and problems to the tree."""

    def __init__(self, tree: Tree, place: Callable[[Node], Place]) -> None:
        self._tree, self._place, self._count = tree, place, 0

    def read(self, node: Node, path: KeyPath, depth: int = 0) -> Any:
        self._count += 1
        if depth > MAX_DEPTH:
            raise self._too_large(node, "nested too deeply")
        if self._count > MAX_VALUES:
            raise self._too_large(node, f"more than {MAX_VALUES:,} values with aliases expanded, too many")
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if node.tag.removeprefix(TAG) not in ("map", "seq"):
            self._refuse_tag(node, path)
        if isinstance(node, MappingNode):
            return self._mapping(node, path, depth)
        for index, item in enumerate(node.value):
            self._tree.places[(*path, index)] = self._place(item)
        return [self.read(item, (*path, index), depth + 1) for index, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                remedy = "quote strings with brackets"
                self._problem(key_node, "a key must be a plain scalar", remedy, code="config.invalid_yaml")
                continue
            key = key_node.value
            if key_node.tag == f"{TAG}merge":
                for name, value in self._merged(value_node, path, depth):
                    values.setdefault(name, value)
                continue
            if key in first:
                what = f"{dotted((*path, key))}: duplicate key, first in {first[key].where}"
                self._problem(key_node, what, "keep one of them", code="config.duplicate_key")
                continue
            first[key] = self._place(key_node)
            if key in values:  # explicit keys override merged ones
                self._tree.forget((*path, key))
            self._tree.places[(*path, key)] = first[key]
            values[key] = self.read(value_node, (*path, key), depth + 1)
        return values

    def _merged(self, node: Node, path: KeyPath, depth: int) -> list[tuple[str, Any]]:
        """Entries of ``<<: *anchor``; explicit keys override them, in any order."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        found: list[tuple[str, Any]] = []
        for each in nodes:
            if isinstance(each, MappingNode):
                kept = dict(self._tree.places)
                found += self.read(each, path, depth + 1).items()
                self._tree.places.update(kept)
            else:
                remedy = "use the anchor of a section"
                self._problem(each, "<<: expects a section (*name)", remedy, code="config.invalid_yaml")
        return found

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        if any(0xD800 <= ord(character) < 0xE000 for character in text):
            what = f"{dotted(path)}: unpaired surrogate"
            self._problem(node, what, "write the character itself", code="config.invalid_yaml")
            return ""
        if node.style in ("'", '"', "|", ">"):
            return text
        kind = node.tag.removeprefix(TAG)
        if kind not in ("null", "bool", "int", "float", "str", "timestamp", "value", "merge"):
            self._refuse_tag(node, path)
            return text
        if kind == "str" and not FLOAT.fullmatch(text):  # also with `!!str`
            return text
        return scalar(text)

    def _refuse_tag(self, node: Node, path: KeyPath) -> None:
        what = f"{dotted(path)}: the YAML tag {node.tag} is not allowed"
        self._problem(node, what, "write a plain value", code="config.yaml_tag_refused")

    def _too_large(self, node: Node, what: str) -> ConfigError:
        where, remedy = self._place(node).where, "check the file name"
        return ConfigError(f"{what} for a configuration", where=where, remedy=remedy, code="config.too_large")

    def _problem(self, node: Node, what: str, remedy: str, *, code: str) -> None:
        self._tree.problems.append(HalftuneError(what, where=self._place(node).where, remedy=remedy, code=code))


def scalar(text: str) -> Any:
    """Convert a plain (unquoted) scalar to a value."""
    if text in NULLS:
        return None
    if text in WORDS:
        return WORDS[text]
    if len(text) > 300:  # longer than any float
        return text
    if INT.fullmatch(text):
        return int(text.replace("_", ""))
    if HEX.fullmatch(text):
        return int(text, 16)
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text.replace("_", ""))):
        return number
    return text
