"""Replaces functions under every name that a loaded module knows them by, and puts them back."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
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
    return None if function is None else _behind(function)


def _behind(function: Function) -> Function:
    """The function that a gate stands before; any other as it is."""
    return next((original for original, gate in _gates.items() if gate.through is function), function)


_FLA, _FLA_OPERATORS = "fla", "fla.ops."
# Parameters of flash-linear-attention's operators that its kernels multiply with each other and want in one format;
# decays, gates and states keep their own.
_FLA_OPERANDS = ("q", "r", "k", "v", "kk", "a", "b")
# Whole passes over a row, or the step of one token; helpers that work by element take any formats.
_FLA_NAMES = re.compile(r"chunk|recurrent|parallel|attn|decod")


def fla_operators() -> Iterator[tuple[Function, tuple[str, ...]]]:
    """The operators of flash-linear-attention that a loaded module outside of it, or one of its layers, knows.

    Yields:
        The function itself, and which of its parameters want one dtype.
    """
    if _FLA not in sys.modules:
        return
    found: dict[Function, None] = {}
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if not module.__name__.startswith((_FLA_OPERATORS, "transformers.")):
            values = [value for value in list(vars(module).values()) if type(value) is FunctionType]
            found |= dict.fromkeys(_behind(one) for one in values if str(one.__module__).startswith(_FLA_OPERATORS))
    for function in found:
        parameters = inspect.signature(function).parameters
        operands = [name for name in _FLA_OPERANDS if name in parameters and _is_asked_for(parameters[name])]
        if _FLA_NAMES.search(function.__name__) and "v" in operands and len(operands) > 1:
            yield function, tuple(operands)


def _is_asked_for(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


@dataclass
class _Gate:
    """What stands where a function was: ``through`` calls ``target``, which can change."""

    through: Function
    target: Function


_gates: dict[Function, _Gate] = {}  # by the original
_open: list[Scope] = []  # the latest last: it decides


class Scope:
    """Functions that are replaced while the scope is open, under every name that a loaded module knows them by.

    A context manager that may be entered again, also inside itself. What stands under a name is a gate: where a model
    keeps it in a partial, a dict, a default argument or an attribute, it calls the replacement while the scope is open,
    and the function itself at any other time. On exit every name is as it was, also in modules loaded meanwhile.

    Args:
        replacements: by the function that they stand for.
    """

    def __init__(self, replacements: Mapping[Function, Function]) -> None:
        self._replacements = dict(replacements)
        self._names: list[tuple[ModuleType, str, Function]] = []
        self._modules = 0  # how many were loaded when names were looked for
        self._depth = 0

    @property
    def names(self) -> list[str]:
        """``module.name`` of each place."""
        return [f"{module.__name__}.{name}" for module, name, _ in self._names]

    @property
    def replaces(self) -> bool:
        """Whether there is anything to replace."""
        return bool(self._replacements)

    @property
    def is_open(self) -> bool:
        """Whether somebody has entered it."""
        return self._depth > 0

    def __enter__(self) -> Scope:
        self._depth += 1
        if self._depth == 1 and self._replacements:
            _open.append(self)
            self._settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._replacements:
            _open.remove(self)
            self._settle()

    def _settle(self) -> None:
        """Gives every gate its target, and every name what belongs there now."""
        if self._modules != len(sys.modules):
            self._look()
        held = {original for scope in _open for original in scope._replacements}
        for original in self._replacements:
            targets = (scope._replacements[original] for scope in _open[::-1] if original in scope._replacements)
            _gates[original].target = next(targets, original)
        for module, name, original in self._names:
            stands, gate = vars(module).get(name), _gates[original].through
            if stands is original or stands is gate:  # nobody else has put something there
                setattr(module, name, gate if original in held else original)

    def _look(self) -> None:
        gates = {original: _gate(original) for original in self._replacements}
        known = {id(function): original for original, gate in gates.items() for function in (original, gate.through)}
        self._modules = len(sys.modules)
        found = {(id(module), name): (module, name, original) for module, name, original in self._names}
        for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
            values = list(vars(module).items())
            if known.keys().isdisjoint([id(value) for _, value in values]):  # thousands of modules know none of them
                continue
            found |= {
                (id(module), name): (module, name, known[id(value)]) for name, value in values if id(value) in known
            }
        self._names = list(found.values())


@contextmanager
def as_installed() -> Iterator[None]:
    """Inside, no scope is open: who takes a function from its package gets the function itself."""
    held = _open[:]
    _open.clear()
    for scope in held:
        scope._settle()
    try:
        yield
    finally:
        _open[:] = held
        for scope in held:
            scope._settle()


def _gate(function: Function) -> _Gate:
    if function not in _gates:

        @functools.wraps(function)
        def through(*args: Any, **kwargs: Any) -> Any:
            return gate.target(*args, **kwargs)

        _gates[function] = gate = _Gate(through, function)
    return _gates[function]
