"""Converts a whole file: which framework it is, the recipe as YAML, and what became of every key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halftune.config.reading.foreign import recognise
from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.render import inline
from halftune.config.run import RunConfig
from halftune.convert.draft import HEADINGS, Draft, Note, Refusal
from halftune.core.errors import ConfigError
from halftune.core.table import load

CONVERTERS: dict[str, str] = {
    "LLaMA-Factory": "halftune.convert.llamafactory.llamafactory:convert",
    "LLaMA-Factory v1": "halftune.convert.llamafactory.v1:convert",
    "axolotl": "halftune.convert.axolotl.axolotl:convert",
    "TRL": "halftune.convert.trl:convert",
}
Status = Literal["same", "approximate", "refused"]


@dataclass(frozen=True)
class Converted:
    """A converted config.

    Attributes:
        framework: where it comes from.
        yaml: the recipe; empty where the config asks for a method or for data that do not exist here.
        values: the same as plain data.
        notes: one for each key of the old config that was dealt with, and for each default that was written out.
    """

    framework: str
    yaml: str
    values: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def status(self) -> Status:
        """``same``; ``approximate``: some keys are done otherwise; ``refused``: something else would be learned."""
        kinds = {note.kind for note in self.notes}
        return "refused" if "refused" in kinds else "approximate" if "changed" in kinds else "same"

    def of(self, kind: str) -> list[Note]:
        """The notes of one kind."""
        return [note for note in self.notes if note.kind == kind]


def convert_file(path: Path, framework: str | None = None, accepted: Iterable[str] = ()) -> Converted:
    """Translates a config of another framework.

    Args:
        path: the YAML file.
        framework: its name; None to recognise it by its keys.
        accepted: keys whose loss is accepted: they do not make the status ``refused``.

    Raises:
        ConfigError: it cannot be read, or is nobody's.
    """
    tree = parse(read_text(path), str(path))
    if tree.problems:
        raise ConfigError(tree.problems)
    name = framework or recognise(tree.values)
    if name is None:
        remedy = f"name it: --from {' | '.join(CONVERTERS)}"
        if "model" in tree.values and ("data" in tree.values or "training" in tree.values):
            remedy = "it looks like a halftune recipe already"
        what = "is not recognised as a config of another framework"
        raise ConfigError(what, where=str(path), remedy=remedy, code="convert.not_recognised")
    draft = Draft(tree.values, name, frozenset(accepted))
    try:
        load(CONVERTERS, name, kind="framework")(draft, path.parent)
    except Refusal as refusal:
        return Converted(name, "", {}, (*draft.notes, Note("refused", refusal.key, "", refusal.why)))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, OSError) as error:
        # the other framework would refuse it too: a list where a number belongs, a name too long for a file
        what = f"a value has an unexpected kind: {error}"
        raise ConfigError(what, where=str(path), code="convert.unexpected_value") from None
    draft.finish()
    return Converted(name, _yaml(draft, path), draft.values, tuple(draft.notes))


def _yaml(draft: Draft, path: Path) -> str:
    head = f"# converted from the {draft.framework} config {path.name} by halftune convert\n"
    order = [name for name in RunConfig.model_fields if name in draft.values]
    return head + "".join(f"{line}\n" for name in order for line in _lines(name, draft.values[name], 0))


def _lines(name: str, value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, dict) and depth == 0:
        yield f"{pad}{name}:"
        for key, inner in value.items():
            yield from _lines(key, inner, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{pad}{name}:"
        yield from (f"{pad}  - {inline(item)}" for item in value)
    else:
        yield f"{pad}{name}: {inline(value)}"


def _value(values: Any, key: str) -> str:
    """What the recipe has under a dotted key, short."""
    for part in key.split("."):
        values = values[part]
    text = inline(values)
    return text if len(text) <= 48 else f"{text[:47]}…"


def report(converted: Converted) -> str:
    """What became of every key, grouped, for people."""
    parts = [f"{converted.framework} → halftune: {converted.status}"]
    for kind, heading in HEADINGS.items():
        notes = converted.of(kind)
        if not notes:
            continue
        parts.append(f"\n{heading} ({len(notes)})")
        width = min(34, max(len(note.key) for note in notes))
        for note in notes:
            arrow = f" → {note.ours}: {_value(converted.values, note.ours)}" if note.ours and converted.yaml else ""
            why = f" · {note.why}" if note.why else ""
            parts.append(f"  {note.key:<{width}}{arrow}{why}")
    return "\n".join(parts)
