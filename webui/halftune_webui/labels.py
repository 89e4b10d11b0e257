"""The board's words, one YAML file per language; no tab holds a word of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

FALLBACK = "en"


@dataclass(frozen=True)
class Words:
    """Labels of one language by dotted key: ``words("train.start")``, ``words("runs.step", step=3)``."""

    language: str
    table: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        """The label under ``key`` with ``{name}`` replaced by ``values``.

        Raises:
            KeyError: no such label.
        """
        text = self.table[key]
        return text.format(**values) if values else text

    def below(self, prefix: str) -> dict[str, str]:
        """The labels under ``prefix``, by the rest of their key."""
        start = f"{prefix}."
        return {key.removeprefix(start): text for key, text in self.table.items() if key.startswith(start)}


@cache
def load_words(language: str) -> Words:
    """The labels of a language in ``labels/<language>.yaml``."""
    text = files("halftune_webui").joinpath("labels", f"{language}.yaml").read_text(encoding="utf-8")
    return Words(language, dict(_flat(yaml.load(text, yaml.BaseLoader), "")))  # "on" is a word here


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
