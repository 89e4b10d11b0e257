"""Changes one value in a recipe's text and leaves everything else as it was written, comments included."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from halftune.config.reading.yaml_source import parse
from halftune.config.render import inline
from halftune.config.shape import expand
from halftune.config.tree import KeyPath, Tree, child
from halftune.core.errors import ConfigError

LABEL = "recipe"


class _Absent:
    """Stands for "no such key"."""


ABSENT = _Absent()
"""As a value: take the key out."""


def read(text: str, label: str = LABEL) -> Tree:
    """The values of a recipe with short forms written out; an empty text is an empty recipe.

    Raises:
        ConfigError: it is no YAML mapping.
    """
    if _is_blank(text):
        return Tree(label, {})
    tree = parse(text, label)
    expand(tree)
    return tree


def set_value(text: str, path: KeyPath, value: Any) -> str:
    """The text with ``value`` at ``path``, or without that key where the value is ``ABSENT``.

    A change that the text cannot take in that place (the only key of a section whose type is implied, say) rewrites
    the section around it. One that no section can take alone (an anchor that is used elsewhere) rewrites the whole
    recipe, which loses its comments.

    Raises:
        ConfigError: the text is no YAML mapping.
    """
    tree = read(text)
    wanted = _with(tree.values, path, value)
    if wanted == tree.values and not (value is not ABSENT and child_at(tree.values, path) is ABSENT):
        return text
    for end in range(len(path), 0, -1):
        above = path[:end]
        changed = _Text(text, tree).changed(above, value if above == path else child_at(wanted, above))
        try:
            if changed is not None and _same(read(changed).values, wanted):
                return changed
        except ConfigError:
            continue
    return render(wanted)


def _with(values: Any, path: KeyPath, value: Any) -> Any:
    """The values with the change, short forms written out as ``read`` does."""
    tree = Tree(LABEL, deepcopy(values))
    if value is ABSENT:
        _remove(tree.values, path)
    else:
        _put(tree.values, path, value)
    expand(tree)
    return tree.values


def child_at(values: Any, path: KeyPath) -> Any:
    """The value at a path, or ``ABSENT``."""
    for part in path:
        known = isinstance(values, dict) and part in values
        listed = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if not (known or listed):
            return ABSENT
        values = child(values, part)
    return values


def render(values: dict[str, Any]) -> str:
    """A recipe with these values, sections as blocks."""
    return "".join(f"{line}\n" for line in _block(values, 0))


def _block(values: dict[str, Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{pad}{inline(key)}:"
            yield from _block(value, depth + 1)
        else:
            yield f"{pad}{inline(key)}: {inline(value)}"


def _same(one: Any, other: Any) -> bool:
    """Equal, and of the same types (1 is not true), in the same order of keys or not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _put(values: Any, path: KeyPath, value: Any) -> None:
    """Sets a key in plain values; sections on the way are made."""
    part: Any = path[0]
    rest = path[1:]
    if isinstance(values, list):
        if part > len(values):
            raise ConfigError(f"there are only {len(values)} entries", where=f"[{part}]", code="config.bad_override")
        if part == len(values):
            values.append(None)
    if not rest:
        values[part] = value
        return
    if not isinstance(child(values, part), dict | list):
        values[part] = [] if isinstance(rest[0], int) else {}
    _put(values[part], rest, value)


def _remove(values: Any, path: KeyPath) -> None:
    """Removes a key from plain values, and sections that are empty then."""
    part: Any = path[0]
    rest = path[1:]
    inner = child(values, part)
    if rest and isinstance(inner, dict | list):
        _remove(inner, rest)
        if isinstance(values, dict) and not inner:
            del values[part]
    elif not rest and isinstance(values, list):
        del values[part : part + 1]
    elif not rest:
        values.pop(part, None)


class _Text:
    """The text as YAML nodes that know where they stand in it."""

    def __init__(self, text: str, tree: Tree) -> None:
        self.text, self.tree = text, tree
        self.root = yaml.compose(text, Loader=yaml.SafeLoader) if not _is_blank(text) else None

    def changed(self, path: KeyPath, value: Any) -> str | None:
        """The text with one change; None where that takes a rewrite of the section around it."""
        if self.root is None:
            return self.text.rstrip("\n") + ("\n" if self.text.strip() else "") + render(_nested(path, value))
        path = self.tree.written.get(path, path)
        chain: list[Node] = [self.root]
        for part in path:
            found = _step(chain[-1], part)
            if found is None:
                return self._inserted(chain[-1], path[len(chain) - 1 :], value)
            chain.append(found)
        return self._removed(path, chain) if value is ABSENT else self._replaced(chain[-1], inline(value))

    def _inserted(self, node: Node, rest: KeyPath, value: Any) -> str | None:
        """With a value below ``node``, at a key that it lacks."""
        if value is ABSENT:
            return None
        if isinstance(node, MappingNode) and isinstance(rest[0], str):
            return self._added(node, rest, value)
        if isinstance(node, SequenceNode) and rest == (len(node.value),) and node.value and not node.flow_style:
            return self._below(node, f"{' ' * node.start_mark.column}- {inline(value)}")
        return None

    def _replaced(self, node: Node, written: str) -> str:
        start, end = node.start_mark.index, _end(node)
        gap = " " if start == end and self.text[start - 1 : start] == ":" else ""
        after = self.text[max(start, end) :]
        comment = after.lstrip(" ")
        if comment.startswith("#"):  # it stays in its column where there is room
            after = " " * max(1, len(after) - len(comment) - len(written) + end - start) + comment
        return f"{self.text[:start]}{gap}{written}{after}"

    def _added(self, node: MappingNode, rest: KeyPath, value: Any) -> str:
        nested = _nested(rest, value)
        if node.flow_style or not node.value:
            written = inline(nested)[1:-1]
            if not node.value:
                return self._replaced(node, f"{{{written}}}")
            at = _end(node.value[-1][1])
            return f"{self.text[:at]}, {written}{self.text[at:]}"
        lines = (" " * node.start_mark.column + line for line in _block(nested, 0))
        return self._below(node, "\n".join(lines))

    def _below(self, node: Node, lines: str) -> str:
        """Puts lines under the last line of a block."""
        at = self.text.find("\n", _end(node))
        if at < 0:
            return f"{self.text.rstrip()}\n{lines}\n"
        return f"{self.text[:at]}\n{lines}{self.text[at:]}"

    def _removed(self, path: KeyPath, chain: list[Node]) -> str | None:
        parent, node = chain[-2], chain[-1]
        assert isinstance(parent, MappingNode | SequenceNode)
        if len(parent.value) == 1 and len(path) > 1 and isinstance(path[-2], str):
            return self._removed(path[:-1], chain[:-1])
        if parent.flow_style:
            return None
        start, before = node.start_mark.index, "-"
        if isinstance(parent, MappingNode):
            start, before = next(key.start_mark.index for key, value in parent.value if key.value == list(path)[-1]), ""
        line = self.text.rfind("\n", 0, start) + 1
        if self.text[line:start].strip(" ") not in ("", before):
            return None
        return self.text[:line] + self.text[max(_end(node), start) :].partition("\n")[2]


def _is_blank(text: str) -> bool:
    """Whether there are only comments."""
    return all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines())


def _nested(path: KeyPath, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    _put(values, path, value)
    return values


def _step(node: Node, part: str | int) -> Node | None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value == part:
                return value
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part]
    return None


def _end(node: Node) -> int:
    """Where the last character of a node stands; a block's own end mark lies behind the comments after it."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        value: Node = last[1] if isinstance(last, tuple) else last
        if value.start_mark.index == value.end_mark.index and isinstance(last, tuple):
            return value.end_mark.index
        return _end(value)
    end = node.end_mark.index
    if isinstance(node, ScalarNode) and node.style in ("|", ">"):
        buffer = node.end_mark.buffer
        return _trimmed(node, buffer) if buffer is not None else end
    return end


def _trimmed(node: Node, buffer: str) -> int:
    end = node.end_mark.index
    while end > node.start_mark.index and buffer[end - 1 : end].isspace():
        end -= 1
    return end
