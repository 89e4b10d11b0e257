"""Renders the resolved configuration as YAML, with the origin of each value; other files, its schema.

In: a `RunConfig` and the origins of its values.
Out: YAML, a JSON Schema, the reference page.
Imported by: `cli`, `convert`, `halftune_webui`, `train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from halftune.config.load import LoadedConfig
from halftune.config.reading.yaml_source import scalar
from halftune.config.tree import DEFAULT, KeyPath, dotted

COLUMN = 60


def resolved_yaml(loaded: LoadedConfig) -> str:
    """Return every value of a run with its origin as a comment; loads into an equal configuration."""
    head = f"# resolved from {loaded.path}; comments: origin of each value\n"
    lines = _section_lines(loaded.run, (), loaded.origins, 0)
    return head + "".join(f"{line}\n" for line in lines)


def _section_lines(section: BaseModel, path: KeyPath, origins: Mapping[str, str], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name in type(section).model_fields:
        value, here = section.__dict__[name], (*path, name)
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _section_lines(value, here, origins, depth + 1)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield f"{pad}{name}:"
            for index, item in enumerate(value):
                rows = list(_section_lines(item, (*here, index), origins, depth + 2))
                yield f"{pad}  - {rows[0].lstrip()}"
                yield from rows[1:]
        else:
            text = f"{pad}{name}: {inline(value)}"
            yield f"{text:<{COLUMN}}  # {origins.get(dotted(here), DEFAULT)}"


def inline(value: Any) -> str:
    """Return a value on one line of YAML, valid for YAML 1.1, YAML 1.2 and our loader."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{inline(str(key))}: {inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return _text(str(value))


def _float(value: float) -> str:
    text = repr(value)
    if "e" in text and "." not in text:  # YAML 1.1 reads 1e-08 as text
        text = text.replace("e", ".0e")
    return text


def _text(text: str) -> str:
    plain = text != "" and text.isprintable() and not set(text) & set("#:{}[],&*!|>'\"%@`\\?") and text == text.strip()
    if plain and not text.startswith(("-", "=", "<", "~")) and scalar(text) == text and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 30).rstrip("\n")
