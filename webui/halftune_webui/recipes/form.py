"""The form as data, drawn from the configuration's schema: a new field appears here by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from halftune.config.render import inline
from halftune.config.run import RunConfig
from halftune.config.shape import ROOT, Shape, accepts, choices, describe, field_shape, options, shape_of
from halftune.config.tree import KeyPath, dotted

COMMON = (
    "model.name_or_path",
    "training.output_dir",
    "precision.compute",
    "attention.backend",
    "data.train",
    "data.max_length",
    "data.packing.enabled",
    "data.eval_split",
    "method.type",
    "method.teacher.name_or_path",
    "adapter.type",
    "adapter.rank",
    "adapter.alpha",
    "training.learning_rate",
    "training.num_train_epochs",
    "training.max_steps",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "distributed.num_processes",
    "distributed.strategy",
)
"""What most people set; everything else is folded away under its section."""


@dataclass(frozen=True)
class Row:
    """One field of the form.

    Attributes:
        path: dotted key; of a field in a list entry, the rest behind the entry (``path``).
        help: the field's own documentation.
        kind: ``choice`` (one word of ``words``), ``flag``, ``several`` (some of ``words``), ``line``, ``lines``
            (one entry each), ``pairs`` (``name: value`` lines), ``entries`` (a list of sections with ``rows`` each).
        words: of a choice; for a line, suggestions.
        default: what an empty field means, as text.
        required: whether it must be filled.
        expects: what may stand here, in words.
        when: the key and the words that bring this field, of a tagged union's variants.
        rows: of entries.
    """

    path: str
    help: str
    kind: str
    words: tuple[str, ...] = ()
    default: str = ""
    required: bool = False
    expects: str = ""
    when: tuple[str, ...] | None = None
    rows: tuple[Row, ...] = field(default=())


@dataclass(frozen=True)
class Group:
    """Fields under one heading; ``name`` is the section's key, or ``common``."""

    name: str
    help: str
    rows: tuple[Row, ...]


def form() -> tuple[Group, ...]:
    """Every field of the configuration, once: the common ones first, then section by section."""
    by_section = {name: tuple(_rows(name, inner)) for name, inner in RunConfig.model_fields.items()}
    every = {row.path: row for rows in by_section.values() for row in rows}
    groups = [Group("common", "", tuple(every[path] for path in COMMON))]
    for name, rows in sorted(by_section.items(), key=lambda pair: len(pair[1]) == 1):  # a lone key comes last
        rest = tuple(row for row in rows if row.path not in COMMON)
        if rest:
            groups.append(Group(name, _plain(RunConfig.model_fields[name].description), rest))
    return tuple(groups)


def as_json(groups: tuple[Group, ...]) -> list[dict[str, Any]]:
    """The form for the page."""
    return [asdict(group) for group in groups]


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _rows(path: str, info: FieldInfo, when: tuple[str, ...] | None = None) -> Iterator[Row]:
    shape = field_shape(info)
    if shape.many:
        section = next(iter(shape.sections.values()))
        inner = tuple(row for name, part in section.model_fields.items() for row in _rows(name, part))
        yield Row(path, _plain(info.description), "entries", required=info.is_required(), when=when, rows=inner)
    elif len(shape.sections) > 1:
        yield from _variants(path, info, shape, when)
    elif shape.sections:
        section = next(iter(shape.sections.values()))
        for name, part in section.model_fields.items():
            yield from _rows(f"{path}.{name}", part, when)
    else:
        yield _row(path, info, shape, when)


def _variants(path: str, info: FieldInfo, shape: Shape, when: tuple[str, ...] | None) -> Iterator[Row]:
    """The choice of a tagged union, and the fields of its sections; a field of several sections once, by the first."""
    tag = f"{path}.type"
    default = info.get_default(call_default_factory=True)
    usual = default.__dict__["type"] if isinstance(default, BaseModel) else ""
    yield Row(tag, _plain(info.description), "choice", words=tuple(shape.sections), default=usual, when=when)
    found: dict[str, Row] = {}
    for word, section in shape.sections.items():
        for name, part in section.model_fields.items():
            for row in _rows(f"{path}.{name}", part, (tag, word)) if name != "type" else ():
                first = found.setdefault(row.path, row)
                if first is not row:
                    default = first.default if first.default == row.default else ""
                    found[row.path] = replace(first, when=(*(first.when or (tag,)), word), default=default)
    yield from found.values()


def _row(path: str, info: FieldInfo, shape: Shape, when: tuple[str, ...] | None) -> Row:
    kind, words = _kind(shape)
    default = "" if info.is_required() else display(info.get_default(call_default_factory=True))
    return Row(path, _plain(info.description), kind, words, default, info.is_required(), describe(shape), when)


def takes_list(shape: Shape) -> bool:
    """Whether a field accepts a list of values."""
    return any(get_origin(shape_of(option).annotation) is tuple for option in options(shape.annotation))


def _kind(shape: Shape) -> tuple[str, tuple[str, ...]]:
    """The widget, and its words."""
    words = tuple(map(display, choices(shape)))
    closed = bool(words) and not any(accepts(shape, kind) for kind in (str, int, float))
    if get_origin(shape.annotation) is dict:
        return "pairs", ()
    if takes_list(shape):
        return ("several" if closed and get_origin(shape.annotation) is tuple else "lines"), words
    if closed:
        return "choice", (("true", "false") if accepts(shape, bool) else ()) + words
    if accepts(shape, bool):
        return "flag", ()
    return "line", words


def display(value: Any) -> str:
    """A value as the form shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "\n".join(display(item) for item in value)
    if isinstance(value, Mapping):
        return "\n".join(f"{inline(str(key))}: {inline(inner)}" for key, inner in value.items())
    return str(value)


def shown(values: Any, shape: Shape = ROOT, path: KeyPath = ()) -> Iterator[tuple[str, str]]:
    """The text of every field that a recipe sets: (dotted key, text). Unknown keys have no field."""
    section = shape.section(values)
    if shape.many and isinstance(values, list):
        one = Shape(shape.annotation, (), shape.sections, False, False)
        for index, item in enumerate(values):
            yield from shown(item, one, (*path, index))
    elif section is not None and isinstance(values, dict):
        for name, inner in section.model_fields.items():
            if name in values:
                yield from shown(values[name], field_shape(inner), (*path, name))
    elif path:
        yield dotted(path), display(values)
