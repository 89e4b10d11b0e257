"""The schema of the configuration: the type of each key, from the section models, and its description."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from halftune.config.run import RunConfig
from halftune.config.sections import LISTED, TYPED, Section

KeyPath = tuple[str | int, ...]
"""The place of a value: ``("data", "train", 0, "path")``."""


def _unwrap(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Takes ``Annotated`` apart and flattens the constraints that pydantic's ``Field`` carries."""
    marks = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        marks = [*more, *marks]
    flat: list[Any] = []
    for mark in marks:
        flat += mark.metadata if isinstance(mark, FieldInfo) else [mark]
    return annotation, flat


def options(annotation: Any) -> tuple[Any, ...]:
    """The types that a union is made of; the type itself where it is none."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


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

    @property
    def item(self) -> Shape:
        """The shape of one entry of a list."""
        inner = get_args(self.annotation)[0] if get_origin(self.annotation) is tuple else Any
        return shape_of(inner)

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
    sections = {_tag(option): option for option in options(inner) if _is_section(option)}
    return Shape(annotation, tuple(marks), sections, many and bool(sections), len(kept) < len(branches))


def field_shape(field: FieldInfo) -> Shape:
    """Return the shape of a section's field."""
    return shape_of(field.annotation, field.metadata)


ROOT = shape_of(RunConfig)


def shape_at(path: KeyPath, values: Any = None) -> Shape | None:
    """Return the shape at a path; ``values`` (the tree) selects the section of a tagged union."""
    shape = ROOT
    for part in path:
        if isinstance(part, int):
            if shape.many:
                shape = Shape(shape.annotation, (), shape.sections, False, False)
            elif get_origin(shape.annotation) is tuple:
                shape = shape.item
            else:
                return None
        elif get_origin(shape.annotation) is dict:
            shape = shape_of(get_args(shape.annotation)[1])
        else:
            section = shape.section(values)
            fields = [section] if section else list(shape.sections.values())
            found = [option.model_fields[part] for option in fields if part in option.model_fields]
            if not found:
                return None
            shape = field_shape(found[0])
        values = child(values, part)
    return shape


def child(values: Any, part: str | int) -> Any:
    """Return the value at a key or index; None if there is none."""
    if isinstance(values, dict):
        return values.get(part)
    if isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
        return values[part]
    return None


def walk(shape: Shape = ROOT, path: KeyPath = ()) -> Iterator[tuple[KeyPath, type[Section], FieldInfo, Shape]]:
    """Yield every key of the schema, depth first: (path, its section, field, shape). List entries have index 0."""
    for section in shape.sections.values():
        for name, field in section.model_fields.items():
            inner = field_shape(field)
            yield (*path, name), section, field, inner
            if inner.sections:
                below = (*path, name, 0) if inner.many else (*path, name)
                yield from walk(inner, below)


def dotted(path: KeyPath) -> str:
    """Format a path as ``data.train[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def related(one: KeyPath, other: KeyPath) -> bool:
    """Whether ``other`` equals or contains ``one``."""
    return one[: len(other)] == other[: len(one)]


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
    found = []
    for mark in metadata:
        match mark:
            case annotated_types.Ge(ge=limit):
                found.append(f"≥ {limit}")
            case annotated_types.Gt(gt=limit):
                found.append(f"> {limit}")
            case annotated_types.Le(le=limit):
                found.append(f"≤ {limit}")
            case annotated_types.Lt(lt=limit):
                found.append(f"< {limit}")
    return f" {' and '.join(found)}" if found else ""
