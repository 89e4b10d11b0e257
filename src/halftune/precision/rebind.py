"""Replaces a function under every name that a loaded module knows it by, and puts it back."""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

Function = Callable[..., Any]


class EntryPoint(Protocol):
    """A function that models call by hand: its module (empty: whichever knows the name), and operands of one dtype."""

    @property
    def module(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...


def installed(entry: EntryPoint) -> Function | None:
    """The function itself, whatever stands before it; None where its package, or the function in it, is not there."""
    try:
        function = vars(importlib.import_module(entry.module)).get(entry.name)
    except ImportError:
        return None
    return next((original for original, gate in _gates.items() if gate.through is function), function)


def rebind(replacements: Mapping[Function, Function]) -> list[str]:
    """Replaces each key by its value in the globals of every loaded module, whatever its name there.

    Finds what was imported by hand (``from flash_attn import flash_attn_func as f``) before; a module that is imported
    later finds the replacement in the package.

    Returns:
        ``module.name`` of each place.
    """
    by_id = {id(original): replacement for original, replacement in replacements.items()}
    places = []
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if by_id.keys().isdisjoint(map(id, list(vars(module).values()))):  # thousands of modules know none of them
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
                places.append(f"{module.__name__}.{name}")
    return places


@contextmanager
def rebound(replacements: Mapping[Function, Function]) -> Iterator[list[str]]:
    """``rebind`` for the length of a block; undone on exit, also in modules that were loaded meanwhile."""
    places = rebind(replacements)
    try:
        yield places
    finally:
        rebind({replacement: original for original, replacement in replacements.items()})


@dataclass
class _Gate:
    """What stands where a function was: ``through`` calls ``target``, which can change."""

    through: Function
    target: Function


_gates: dict[Function, _Gate] = {}  # by the original; one for the life of the process
_open: Counter[Function] = Counter()  # blocks that an original's gate stands for


@contextmanager
def gated(replacements: Mapping[Function, Function]) -> Iterator[list[str]]:
    """``rebound`` by gates, which also answers for what a model keeps of a function outside of its module's globals.

    A gate in a partial, a dict, a default argument or an attribute, taken while the block was open, calls the
    replacement of the moment; between blocks it calls the function itself.

    Yields:
        ``module.name`` of each place.
    """
    gates = {original: _gate(original) for original in replacements}
    before = {original: gate.target for original, gate in gates.items()}
    for original, gate in gates.items():
        gate.target = replacements[original]
    places = rebind({original: gate.through for original, gate in gates.items()})
    _open.update(gates.keys())
    try:
        yield places
    finally:
        for original, gate in gates.items():
            gate.target = before[original]
        _open.subtract(gates.keys())
        rebind({gate.through: original for original, gate in gates.items() if not _open[original]})


def _gate(function: Function) -> _Gate:
    if function not in _gates:

        @functools.wraps(function)
        def through(*args: Any, **kwargs: Any) -> Any:
            return gate.target(*args, **kwargs)

        _gates[function] = gate = _Gate(through, function)
    return _gates[function]
