"""Documentation generated from the schema: the Markdown reference and a recipe with every key explained."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from textwrap import wrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from halftune.config.render import inline
from halftune.config.run import RunConfig
from halftune.config.sections import Section
from halftune.config.shape import Shape, choices, describe, field_shape

# Values for required keys in the explained recipe.
EXAMPLES: dict[str, Any] = {"name_or_path": "builtin:qwen2-tiny", "output_dir": "runs/my-run"}
EXAMPLE_SOURCE = "builtin:python-docs"
WIDTH = 110


def markdown() -> str:
    """Return the text of docs/reference/config.md."""
    head = files("halftune.config.render").joinpath("config_head.md").read_text(encoding="utf-8")
    parts = [head, _table("The top level", RunConfig, doc="")]
    for name, field in RunConfig.model_fields.items():
        parts += _chapters(name, field_shape(field))
    return "\n".join(parts)


def _chapters(path: str, shape: Shape) -> Iterator[str]:
    for tag, section in shape.sections.items():
        title = f"`{path}`" if len(shape.sections) == 1 else f"`{path}`: type `{tag}`"
        yield _table(title, section, doc=(section.__doc__ or "").strip())
        for name, field in section.model_fields.items():
            inner = field_shape(field)
            if inner.sections:
                yield from _chapters(f"{path}.{name}" + ("[]" if inner.many else ""), inner)


def _table(title: str, section: type[Section], *, doc: str) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = (f"`{name}`", describe(field_shape(field)), _default(field), field.description or "")
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    text = "\n".join(rows)
    return f"## {title}\n\n{doc}\n\n{text}\n" if doc else f"## {title}\n\n{text}\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        section = type(default)
        assert issubclass(section, Section)
        if section.word:
            return f"`{inline(default.__dict__[section.word])}`"
        return f"`{default.__dict__['type']}`" if "type" in section.model_fields else "see below"
    return "" if default is None else f"`{inline(default)}`"


def explained_yaml() -> str:
    """Return a valid recipe with every key, its default and description."""
    head = "# Every key of a recipe with its default.\n"
    return head + "\n".join(_explained(RunConfig, 0)) + "\n"


def _explained(section: type[Section], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, field in section.model_fields.items():
        shape = field_shape(field)
        if depth == 0:
            yield ""
        allowed = f" ({describe(shape)})" if not shape.sections and choices(shape) else ""
        for line in wrap(f"{' '.join((field.description or '').split())}{allowed}", WIDTH - len(pad)):
            yield f"{pad}# {line}"
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if shape.many and field.is_required():
            yield f"{pad}{name}:"
            first, *others = _flat(next(iter(shape.sections.values())))
            yield f"{pad}  - {first}"
            yield from (f"{pad}    {row}" for row in others)
        elif shape.sections and not shape.many:
            yield from _explained_section(name, shape, default, depth)
        else:
            yield f"{pad}{name}: {inline(EXAMPLES.get(name) if field.is_required() else default)}"


def _explained_section(name: str, shape: Shape, default: Any, depth: int) -> Iterator[str]:
    """A section that is chosen by default, and its alternatives as comments."""
    pad = "  " * depth
    chosen = type(default) if isinstance(default, Section) else next(iter(shape.sections.values()))
    yield f"{pad}{name}:"
    yield from _explained(chosen, depth + 1)
    for other in shape.sections.values():
        if other is not chosen:
            yield f"{pad}# or {name}:"
            yield from (f"{pad}#   {line}" for line in _flat(other))


def _flat(section: type[Section]) -> Iterator[str]:
    """Keys of a section on one line each."""
    for name, field in section.model_fields.items():
        if field.is_required():
            tag = choices(field_shape(field))
            yield f"{name}: {inline(tag[0] if tag else EXAMPLES.get(name, EXAMPLE_SOURCE))}"
        else:
            yield f"{name}: {inline(field.get_default(call_default_factory=True))}"
