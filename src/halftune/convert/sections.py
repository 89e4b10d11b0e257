"""Nested sections: each key has a rule in ``keys/sections.yaml``, or is named in the report as not converted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from halftune.convert.draft import Draft, block_of_rules, is_off, table, tables
from halftune.core.files import read_limited

_OFFLOAD = "distributed.fsdp.cpu_offload"


def sections(draft: Draft, folder: Path) -> None:
    """Deal with every section, and with files that hold one; call it when the trainer's keys are known."""
    if "offload" in str(draft.left.get("fsdp")):
        draft.translated("fsdp", _OFFLOAD, True, "where the model is shared by fsdp2")
    for name in tables("sections"):
        value = draft.left.get(name)
        if is_off(value):
            draft.drop(name, "is off")
        elif isinstance(value, dict):
            _section(draft, name, value)
        elif isinstance(value, str):
            _file(draft, name, value, folder)


def _section(draft: Draft, name: str, values: dict[str, Any]) -> None:
    """Each key of a section by its rule. What it sets is no default any more."""
    accepted = frozenset(key.removeprefix(f"{name}.").replace(".", "/") for key in draft.accepted)
    known = {key for key, _ in block_of_rules("sections", name)}
    inner = Draft(dict(_flat(values, known)), draft.framework, accepted, draft.values)
    inner.follow(f"sections.{name}")
    inner.finish()
    draft.take(name)
    ours = {note.ours for note in inner.notes} - {""}
    kept = [note for note in draft.notes if note.kind != "default" or note.ours not in ours]
    draft.notes[:] = kept + [replace(note, key=f"{name}.{note.key.replace('/', '.')}") for note in inner.notes]


def _flat(values: Mapping[str, Any], known: set[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with the sections that they are in, without the prefix of FSDP's."""
    for name, value in values.items():
        key = f"{place}{name}" if f"{place}{name}" in known else place + str(name).removeprefix("fsdp_")
        if isinstance(value, dict) and value and key not in known:
            yield from _flat(value, known, f"{key}/")
        else:
            yield key, value


def _file(draft: Draft, name: str, text: str, folder: Path) -> None:
    """A section as JSON, or in a JSON file, which is looked for in the config's folder and those above it."""
    places = (one / text for one in (folder.resolve(), *folder.resolve().parents))
    path = None if text.startswith("{") else next((one for one in places if one.is_file()), None)
    values = _json(text if path is None else path)
    shipped = table("trainer", "deepspeed_files").get(Path(text).name)
    if isinstance(values, dict):
        _section(draft, name, values)
    elif path is None and shipped:
        draft.translated(name, _OFFLOAD, True, f"as {draft.framework} ships it; the file was not found here")
    elif path is None and shipped is not None:
        draft.none(name, f"shares the model, as {draft.framework} ships it; the file was not found here")
    else:
        why = "was not found" if path is None else "cannot be read"
        draft.changed(name, "", None, f"{text} {why}: see whether it says more than how the model is shared")


def _json(source: str | Path) -> Any:
    """A parsed text or file; None where it is no JSON."""
    try:
        return json.loads(source if isinstance(source, str) else read_limited(source).decode())
    except (OSError, ValueError):
        return None
