"""The web UI's words, one YAML file per language; no tab holds a word of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from halftune.core.errors import HalftuneError
from halftune_webui.phrases import Phrases

FALLBACK = "en"


@dataclass(frozen=True)
class Words:
    """Labels of one language by dotted key: ``words("train.start")``, ``words("runs.step", step=3)``.

    Attributes:
        language: its code.
        table: dotted key → label.
        said: what halftune says in English, in this language as far as it is known.
        codes: error code → what it means, in this language; empty in English.
    """

    language: str
    table: Mapping[str, str]
    said: Phrases = field(default_factory=Phrases)
    codes: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, key: str, **values: object) -> str:
        """The label under ``key`` with ``{name}`` replaced by ``values``.

        Raises:
            KeyError: no such label.
        """
        text = self.table[key]
        return text.format(**values) if values else text

    def problem(self, problem: HalftuneError, *, place: bool = True) -> str:
        """What is wrong, with its place or without, the remedy and the code: ``place: what · remedy [code]``.

        A sentence that is not known in this language stands behind what its code means.
        """
        head = f"{problem.where}: " if place and problem.where else ""
        tail = f" · {self.said(problem.remedy)}" if problem.remedy else ""
        what = self.said(problem.what)
        if what == problem.what and problem.code in self.codes:
            what = f"{self.codes[problem.code]} ({what})"
        return f"{head}{what}{tail} [{problem.code}]"

    def below(self, prefix: str) -> dict[str, str]:
        """The labels under ``prefix``, by the rest of their key."""
        start = f"{prefix}."
        return {key.removeprefix(start): text for key, text in self.table.items() if key.startswith(start)}


@cache
def load_words(language: str) -> Words:
    """The labels of a language: ``labels/<language>.yaml``, its sentences in ``reasons`` and errors in ``codes``."""
    table = dict(_flat(_read(language), ""))
    if language == FALLBACK:
        return Words(language, table)
    sentences, theirs = (dict(_flat(_read(f"reasons.{one}"), "")) for one in (FALLBACK, language))
    return Words(language, table, Phrases(sentences, theirs), _read(f"codes.{language}"))


def _read(name: str) -> dict[str, Any]:
    text = files("halftune_webui").joinpath("labels", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, yaml.BaseLoader)  # "on" is a word here


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
