"""The JSON Schema of the configuration (draft 2020-12), with which editors complete and check a recipe."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from halftune.config.reading.spellings import FORMATS
from halftune.config.run import RunConfig
from halftune.config.section import LISTED, TYPED, Section
from halftune.config.shape import Shape, field_shape, options, shape_of, walk

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
LIMITS = {
    annotated_types.Ge: ("ge", "minimum"),
    annotated_types.Gt: ("gt", "exclusiveMinimum"),
    annotated_types.Le: ("le", "maximum"),
    annotated_types.Lt: ("lt", "exclusiveMaximum"),
}


def json_schema() -> dict[str, Any]:
    """The schema, short ways of writing and the usual spellings of precision included."""
    sections = {section.__name__: section for _, _, _, shape in walk() for section in shape.sections.values()}
    schema = {"$schema": DRAFT, "title": "A halftune recipe", **_section(RunConfig)}
    schema["$defs"] = {name: _section(section) for name, section in sorted(sections.items())}
    for holder in (schema, schema["$defs"]["TrainingSection"]):
        for name, word in FORMATS.items():
            description = f"Another way to write `precision: {word}`."
            holder["properties"][name] = {"enum": [True, False, "auto", None], "description": description}
    return schema


def _section(section: type[Section]) -> dict[str, Any]:
    fields = section.model_fields
    return {
        "type": "object",
        "description": (section.__doc__ or "").strip(),
        "properties": {name: _field(field) for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.is_required() or name == "type"],
        "additionalProperties": False,
    }


def _field(field: FieldInfo) -> dict[str, Any]:
    schema = _value(field_shape(field))
    if field.description:
        schema["description"] = field.description
    if not field.is_required():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, tuple):
            default = list(default)
        if not isinstance(default, BaseModel):
            schema["default"] = default
    return schema


def _value(shape: Shape) -> dict[str, Any]:
    found = _sections(shape) if shape.sections else _plain(shape)
    if shape.optional:
        found.append({"type": "null"})
    return dict(found[0]) if len(found) == 1 else {"anyOf": found}


def _sections(shape: Shape) -> list[dict[str, Any]]:
    one: list[dict[str, Any]] = [{"$ref": f"#/$defs/{section.__name__}"} for section in shape.sections.values()]
    section = next(iter(shape.sections.values()))
    if TYPED in shape.metadata:
        one.insert(0, {"enum": list(shape.sections)})
    elif section.word:
        one.insert(0, _value(field_shape(section.model_fields[section.word])))
    if not shape.many:
        return one
    items = one[0] if len(one) == 1 else {"anyOf": one}
    array = {"type": "array", "items": items, **_limits(shape)}
    return [*one, array] if LISTED in shape.metadata else [array]


def _plain(shape: Shape) -> list[dict[str, Any]]:
    found = []
    for option in options(shape.annotation):
        inner = shape_of(option, shape.metadata)
        origin = get_origin(inner.annotation)
        if origin is Literal:
            found.append({"enum": list(get_args(inner.annotation))})
        elif origin is tuple:
            if LISTED in shape.metadata:
                found.append(_value(inner.item))
            found.append({"type": "array", "items": _value(inner.item), **_limits(inner)})
        elif origin is dict or inner.annotation is dict:
            values = get_args(inner.annotation)
            found.append({"type": "object", "additionalProperties": _value(shape_of(values[1])) if values else True})
        elif inner.annotation in TYPES:
            found.append({"type": TYPES[inner.annotation], **_limits(inner)})
        else:
            found.append({})  # anything
    return found


def _limits(shape: Shape) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for mark in shape.metadata:
        if type(mark) in LIMITS:
            attribute, keyword = LIMITS[type(mark)]
            limits[keyword] = getattr(mark, attribute)
        elif isinstance(mark, annotated_types.MinLen):
            limits["minItems"] = mark.min_length
    return limits
