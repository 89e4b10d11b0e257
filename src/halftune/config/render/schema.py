"""The JSON Schema of the configuration (draft 2020-12), for completion and validation in editors."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from halftune.config.reading.overrides import FORMATS
from halftune.config.run import RunConfig
from halftune.config.sections import LISTED, TYPED
from halftune.config.shape import Shape, walk

# pydantic's names of limits behind a validator of ours.
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "minLength": "minItems",
}


class _Generator(GenerateJsonSchema):
    """pydantic's generator, without a title for every key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """Return the schema, including short forms and other spellings of precision."""
    schema = {
        "$schema": _Generator.schema_dialect,
        **_with_limits(RunConfig.model_json_schema(schema_generator=_Generator)),
        "title": "A halftune recipe",
    }
    sections: dict[str, Any] = {RunConfig.__name__: schema, **schema["$defs"]}
    shapes = {(section.__name__, str(path[-1])): shape for path, section, _, shape in walk()}
    for (section, key), shape in shapes.items():
        properties = sections[section]["properties"]
        properties[key] = _with_short_forms(properties[key], shape, sections)
    for section in schema["$defs"].values():
        if "type" in section["properties"]:
            section["required"] = ["type", *(key for key in section.get("required", []) if key != "type")]
    for holder in (schema, sections["TrainingSection"]):
        for name, word in FORMATS.items():
            description = f"Another way to write `precision: {word}`."
            holder["properties"][name] = {"enum": [True, False, "auto", None], "description": description}
    return schema


def _with_limits(said: Any) -> Any:
    if isinstance(said, list):
        return [_with_limits(each) for each in said]
    if isinstance(said, dict):
        return {_LIMITS.get(name, name): _with_limits(value) for name, value in said.items()}
    return said


def _with_short_forms(said: dict[str, Any], shape: Shape, sections: dict[str, Any]) -> dict[str, Any]:
    """Extend a key's schema by its short forms."""
    notes = {name: said[name] for name in ("description", "default") if name in said}
    said = {name: value for name, value in said.items() if name not in notes}
    short = _short_form(shape, sections)
    if short is not None and shape.many:
        said["items"] = {"anyOf": [short, said["items"]]}
    elif short is not None:
        said = {"anyOf": [short, said]}
    if LISTED in shape.metadata:
        said = {"anyOf": [said["items"], said]}
    return {**said, **notes}


def _short_form(shape: Shape, sections: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the word that stands for a section; None if it has none."""
    if TYPED in shape.metadata:
        return {"enum": list(shape.sections)}
    section = next(iter(shape.sections.values()), None)
    if section is None or not section.word:
        return None
    word = sections[section.__name__]["properties"][section.word]
    return {name: value for name, value in word.items() if name not in ("description", "default")}
