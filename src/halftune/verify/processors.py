"""Compares what makes inputs of images, videos and sounds: settings of processors, which no probe of text shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halftune.config.facts.folder import read_json
from halftune.config.facts.media import PROCESSOR_FILES
from halftune.verify.targets import Finding

_FREE = ("_type", "_class", "_version", "auto_map")  # ends of keys that change no number


def takes_media(folder: Path) -> bool:
    """Whether a folder has a processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def compare_processors(reference: Path, target: Path) -> list[Finding]:
    """Settings that both folders have and that differ.

    Releases of transformers write them into other files and sections, so that a setting is known by its name; one with
    several values in a folder (of the image and of the video processor) is not compared.

    Args:
        reference, target: folders of models.
    """
    ours, theirs = _settings(reference), _settings(target)
    names = [name for name in ours if len(ours[name]) == len(theirs.get(name, ())) == 1 and ours[name] != theirs[name]]
    shown = [f"{name} is {theirs[name][0]!r:.60}, not {ours[name][0]!r:.60}" for name in names]
    return [Finding("processor.differ", "; ".join(shown))] if shown else []


def _settings(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for name in PROCESSOR_FILES:
        for key, value in _leaves(read_json(folder / name)) if (folder / name).is_file() else ():
            if value is not None and not key.endswith(_FREE) and value not in found[key]:
                found[key].append(value)
    return found


def _leaves(content: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values; a section of a processor has no name, another one (``size``) stands before its keys."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, "" if key.endswith(("_processor", "_extractor")) else f"{key}.")
        else:
            yield above + key, value
