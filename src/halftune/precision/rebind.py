"""Replaces a function under every name that a loaded module knows it by, and puts it back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol


class EntryPoint(Protocol):
    """A function that models call by hand: its module (empty: whichever knows the name), and operands of one dtype."""

    @property
    def module(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...


def installed(entry: EntryPoint) -> Callable[..., Any] | None:
    """The function; None where its package, or the function in it, is not there."""
    try:
        return vars(importlib.import_module(entry.module)).get(entry.name)
    except ImportError:
        return None


def rebind(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> list[str]:
    """Replaces each key by its value in the globals of every loaded module, whatever its name there.

    Finds what was imported by hand (``from flash_attn import flash_attn_func as f``) before; a module that is imported
    later finds the replacement in the package.

    Returns:
        ``module.name`` of each place.
    """
    by_id = {id(original): replacement for original, replacement in replacements.items()}
    places = []
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
                places.append(f"{module.__name__}.{name}")
    return places


@contextmanager
def rebound(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[list[str]]:
    """``rebind`` for the length of a block; undone on exit, also in modules that were loaded meanwhile."""
    places = rebind(replacements)
    try:
        yield places
    finally:
        rebind({replacement: original for original, replacement in replacements.items()})
