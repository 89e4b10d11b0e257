"""Registries: tables of import paths, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from halftune.core.errors import ConfigError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean X?`` for a misspelt name, or the list of known names if none is similar."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def load(table: Mapping[str, str], name: str, *, kind: str) -> Any:
    """Import and return the object at ``table[name]``, ``"package.module:Name"``.

    Raises:
        ConfigError: ``name`` is not in the table; suggests a similar one. ``kind`` names the table ("callback").
    """
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}", remedy=did_you_mean(name, table), code="core.unknown_name")
    return named(table[name])


def named(place: str) -> Any:
    """Import and return the object at ``"package.module:Name"``."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
