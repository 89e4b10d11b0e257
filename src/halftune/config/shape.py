"""The schema of the configuration: the type of each key, from the section models, and its description."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from halftune.config.run import RunConfig
from halftune.config.sections import LISTED, TYPED, PathMark, Section, listed, typed, worded
from halftune.config.tree import KeyPath, Tree, child


def _unwrap(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Takes ``Annotated`` apart and flattens the constraints that pydantic's ``Field`` carries."""
    marks = list(metadata)
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks = [*more, *marks]
    return annotation, [one for mark in marks for one in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]


def options(annotation: Any) -> tuple[Any, ...]:
    """The types that a union is made of; the type itself where it is none."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _tag(section: type[Section]) -> str:
    field = section.model_fields.get("type")
    tags = get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()
    return str(tags[0]) if tags else ""


@dataclass(frozen=True)
class Shape:
    """What may stand under a key.

    Attributes:
        annotation: the type, without ``None``.
        metadata: constraints and marks.
        sections: the accepted sections by tag (``""`` if there is only one); empty for a plain value.
        many: whether it is a list of these sections.
        optional: whether ``null`` is allowed.
    """

    annotation: Any
    metadata: tuple[Any, ...]
    sections: dict[str, type[Section]]
    many: bool
    optional: bool

    def below(self, part: str | int, value: Any = None) -> Shape | None:
        """Return the shape of a key or an entry, if there is one; ``value`` selects the section of a tagged union."""
        origin = get_origin(self.annotation)
        if isinstance(part, int):
            return shape_of(get_args(self.annotation)[0]) if origin is tuple else None
        if origin is dict:
            return shape_of(get_args(self.annotation)[1])
        section = self.section(value)
        for option in [section] if section else self.sections.values():
            if part in option.model_fields:
                return _fields(option)[part]
        return None

    def section(self, value: Any) -> type[Section] | None:
        """The section that ``value`` selects by its tag; None if it has no known tag."""
        if len(self.sections) == 1:
            return next(iter(self.sections.values()))
        tag = value.get("type") if isinstance(value, dict) else None
        return self.sections.get(tag) if isinstance(tag, str) else None


def shape_of(annotation: Any, metadata: Sequence[Any] = ()) -> Shape:
    """Convert a type annotation to a shape."""
    annotation, marks = _unwrap(annotation, metadata)
    branches = options(annotation)
    kept = tuple(option for option in branches if option is not type(None))
    if len(kept) == 1 and len(branches) > 1:
        annotation, marks = _unwrap(kept[0], marks)
    many = get_origin(annotation) is tuple
    inner = _unwrap(get_args(annotation)[0], ())[0] if many else annotation
    sections = {_tag(one): one for one in options(inner) if isinstance(one, type) and issubclass(one, Section)}
    return Shape(annotation, tuple(marks), sections, many and bool(sections), len(kept) < len(branches))


def field_shape(field: FieldInfo) -> Shape:
    """Return the shape of a section's field."""
    return shape_of(field.annotation, field.metadata)


@cache
def _fields(section: type[Section]) -> dict[str, Shape]:
    return {name: field_shape(field) for name, field in section.model_fields.items()}


ROOT = shape_of(RunConfig)


def shape_at(path: KeyPath, values: Any = None) -> Shape | None:
    """Return the shape at a path; ``values`` (the tree) selects the section of a tagged union."""
    shape: Shape | None = ROOT
    for part in path:
        if shape is None:
            return None
        shape, values = shape.below(part, values), child(values, part)
    return shape


def expand(tree: Tree, folder: Path | None = None) -> None:
    """Write out every short form, in place; ``tree.written`` records the original paths.

    With ``folder``, the recipe's, paths are completed too: ``~`` everywhere, inputs that exist only beside the recipe,
    and recipes.
    """
    _expand(tree, tree.values, ROOT, (), folder)


def _expand(tree: Tree, value: Any, shape: Shape, path: KeyPath, folder: Path | None) -> Any:
    value = written_out(tree, value, shape, path)
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in parts:
        if (below := shape.below(part, value)) is not None:
            value[part] = _expand(tree, inner, below, (*path, part), folder)
    return _whole(value, shape, folder) if folder is not None and isinstance(value, str) else value


def written_out(tree: Tree, value: Any, shape: Shape, path: KeyPath) -> Any:
    """Write out a value's own short form: of a list, a section, or a section of the default type."""
    if LISTED in shape.metadata and (entries := listed(value)) is not value:
        tree.move_down(path)
        return entries
    if shape.many or not shape.sections:
        return value
    first = next(iter(shape.sections.values()))
    section = typed(value) if TYPED in shape.metadata else worded(value, first)
    if section is not value:
        tree.written[(*path, *section)] = path
    elif TYPED in shape.metadata and isinstance(value, dict) and "type" not in value:
        usual = [tag for tag, option in shape.sections.items() if not option.model_fields["type"].is_required()]
        return {"type": usual[0], **value} if usual else value
    return section


def _whole(name: str, shape: Shape, folder: Path) -> str:
    """A path for the working directory; another text unchanged."""
    mark = next((mark for mark in shape.metadata if isinstance(mark, PathMark)), None)
    if mark is None or not name or "\0" in name:
        return name
    name = os.path.expanduser(name)
    beside = os.path.abspath(folder / name)
    only_beside = not os.path.isabs(name) and not os.path.exists(name) and os.path.exists(beside)
    return beside if mark is PathMark.RECIPE or (mark is PathMark.INPUT and only_beside) else name


def walk(shape: Shape = ROOT, path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section], FieldInfo, Shape]]:
    """Yield every key of the schema, depth first: (path, its section, field, shape). List entries have index 0."""
    for section in shape.sections.values():
        for name, field in section.model_fields.items():
            inner = field_shape(field)
            yield (*path, name), section, field, inner
            if inner.sections:
                below = (*path, name, 0) if inner.many else (*path, name)
                yield from walk(inner, below)


def choices(shape: Shape) -> tuple[Any, ...]:
    """Return the accepted words of a value (literals and tags)."""
    found: list[Any] = list(shape.sections) if len(shape.sections) > 1 else []
    for option in options(shape.annotation):
        inner, _ = _unwrap(option, ())
        if get_origin(inner) is Literal:
            found += get_args(inner)
        elif get_origin(inner) is tuple:
            found += choices(shape_of(get_args(inner)[0]))
    return tuple(dict.fromkeys(found))


def accepts(shape: Shape, kind: type) -> bool:
    """Whether a plain ``kind`` (``bool``, ``int``, ``str`` …) is among the allowed types."""
    return any(_unwrap(option, ())[0] is kind for option in options(shape.annotation))


def describe(shape: Shape) -> str:
    """Describe the accepted values, to follow "expected"."""
    if shape.sections:
        words = []
        section = next(iter(shape.sections.values()))
        if len(shape.sections) > 1 and TYPED in shape.metadata:
            words = [" or ".join(shape.sections)]
        elif section.word and not shape.many:
            words = [describe(field_shape(section.model_fields[section.word]))]
        noun = "a list of sections" if shape.many else "a section of keys"
        if shape.many and LISTED in shape.metadata:
            words = ["a path"]
        return ", or ".join([*words, noun])
    return _describe(shape.annotation, shape.metadata)


_NOUNS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping of names to values",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_PLURALS = {"an integer": "integers", "a number": "numbers", "a string": "strings"}


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    annotation, metadata = _unwrap(annotation, metadata)
    branches = [option for option in options(annotation) if option is not type(None)]
    if len(branches) > 1:
        return ", or ".join(dict.fromkeys(_describe(option, metadata) for option in branches))
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        words = list(map(str, get_args(annotation)))
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        items = _describe(get_args(annotation)[0], ())
        if items.startswith("one of"):
            return f"a list with any of {items[7:]}"
        return f"a list of {_PLURALS.get(items, items)}"
    said = next(filter(lambda mark: isinstance(mark, str), metadata), "")
    return said or _NOUNS.get(origin, "a value") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    found = [
        f"{sign} {getattr(mark, name)}" for mark in metadata for name, sign in _SIGNS.items() if hasattr(mark, name)
    ]
    return f" {' and '.join(found)}" if found else ""
