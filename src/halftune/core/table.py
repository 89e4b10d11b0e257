"""Registries are plain tables of strings, imported on choice, so that a name costs nothing until it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from halftune.core.errors import ConfigError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean X?`` for a misspelt name, or the list of what is known when nothing is close."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def load(table: Mapping[str, str], name: str, *, kind: str) -> Any:
    """Imports and returns the object that ``table`` names ``"package.module:Name"`` under ``name``.

    Raises:
        ConfigError: ``name`` is not in the table; says what it may have meant. ``kind`` names the table ("callback").
    """
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}", remedy=did_you_mean(name, table))
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
