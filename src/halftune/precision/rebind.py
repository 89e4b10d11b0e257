"""Monkey-patches functions under every name in loaded modules, reversibly."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol

Function = Callable[..., Any]
_FLA, _FLA_OPERATORS = "fla", "fla.ops."
# Parameters of flash-linear-attention's operators that its kernels multiply and that must share one dtype;
# decays, gates and states keep theirs.
_FLA_OPERANDS = ("q", "r", "k", "v", "kk", "a", "b")
# Full passes over a row or single-token steps; elementwise functions accept mixed dtypes.
_FLA_NAMES = re.compile(r"chunk|recurrent|parallel|attn|decod")


class EntryPoint(Protocol):
    """A function that models import directly: module (empty: any), name, and operands that must share one dtype."""

    @property
    def module(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...


def installed(entry: EntryPoint) -> Function | None:
    """Return the original function, even if patched; None if the package or function is missing."""
    try:
        function = vars(importlib.import_module(entry.module)).get(entry.name)
    except ImportError:
        return None
    return None if function is None else unpatched(function)


def unpatched(function: Function) -> Function:
    """Return the original of a patched function; any other function unchanged."""
    return next((original for original, patch in _patches.items() if patch.wrapper is function), function)


def _fla_functions() -> dict[Function, None]:
    """The original functions of ``fla.ops`` that other modules have imported."""
    found: dict[Function, None] = {}
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if not module.__name__.startswith((_FLA_OPERATORS, "transformers.")):
            values = [value for value in list(vars(module).values()) if type(value) is FunctionType]
            found |= dict.fromkeys(unpatched(one) for one in values if str(one.__module__).startswith(_FLA_OPERATORS))
    return found


def fla_operators() -> Iterator[tuple[Function, tuple[str, ...]]]:
    """Yield flash-linear-attention's operators that loaded modules outside ``fla.ops`` have imported.

    Yields:
        The original function, and its parameters that must share one dtype.
    """
    if _FLA not in sys.modules:
        return
    for function in _fla_functions():
        parameters = inspect.signature(function).parameters
        operands = [name for name in _FLA_OPERANDS if name in parameters and _is_required(parameters[name])]
        if _FLA_NAMES.search(function.__name__) and "v" in operands and len(operands) > 1:
            yield function, tuple(operands)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


@dataclass
class _Patch:
    """The replacement of a function: ``wrapper`` calls ``target``, which can change."""

    wrapper: Function
    target: Function


_patches: dict[Function, _Patch] = {}  # by original function
_open: list[Scope] = []  # open scopes; the last takes precedence


class Scope:
    """Replaces functions while it is open, under every name in loaded modules.

    A reentrant context manager. Names are bound to a wrapper: a model that keeps it in a partial, a dict, a default
    argument or an attribute calls the replacement while the scope is open, and the original otherwise. On exit all
    names are restored, also in modules loaded meanwhile.

    Args:
        replacements: replacement by original function.
        within: modules to patch; default all loaded modules.
    """

    def __init__(self, replacements: Mapping[Function, Function], within: Sequence[ModuleType] | None = None) -> None:
        self._replacements = dict(replacements)
        self._within = within
        self._names: list[tuple[ModuleType, str, Function]] = []
        self._modules = 0  # number of loaded modules at the last search
        self._depth = 0

    @property
    def names(self) -> list[str]:
        """``module.name`` of each patched name."""
        return [f"{module.__name__}.{name}" for module, name, _ in self._names]

    @property
    def replaces(self) -> bool:
        """Whether there is anything to replace."""
        return bool(self._replacements)

    @property
    def is_open(self) -> bool:
        """Whether the scope has been entered."""
        return self._depth > 0

    def __enter__(self) -> Scope:
        self._depth += 1
        if self._depth == 1 and self._replacements:
            _open.append(self)
            self._apply()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._replacements:
            _open.remove(self)
            self._apply()

    def _apply(self) -> None:
        """Update the wrappers' targets, and bind or restore names."""
        if self._modules != len(sys.modules):
            self._find_names()
        held: dict[Function, Function] = {}  # the last one opened replaces a function
        for scope in _open:
            held |= scope._replacements
        for original in self._replacements:
            _patches[original].target = held.get(original, original)
        for module, name, original in self._names:
            bound, wrapper = vars(module).get(name), _patches[original].wrapper
            if bound is original or bound is wrapper:  # not rebound by others
                setattr(module, name, wrapper if original in held else original)

    def _find_names(self) -> None:
        patches = {original: _patch(original) for original in self._replacements}
        known = {
            id(function): original for original, patch in patches.items() for function in (original, patch.wrapper)
        }
        self._modules = len(sys.modules)
        names = {(id(module), name): (module, name, original) for module, name, original in self._names}
        modules = list(sys.modules.values()) if self._within is None else self._within
        for module in [module for module in modules if isinstance(module, ModuleType)]:
            values = list(vars(module).items())
            if known.keys().isdisjoint([id(value) for _, value in values]):  # as in almost all modules
                continue
            names |= {
                (id(module), name): (module, name, known[id(value)]) for name, value in values if id(value) in known
            }
        self._names = list(names.values())


@contextmanager
def as_installed() -> Iterator[None]:
    """Inside, no scope is open: imported functions are the originals."""
    held = _open[:]
    _open.clear()
    for scope in held:
        scope._apply()
    try:
        yield
    finally:
        _open[:] = held
        for scope in held:
            scope._apply()


def _patch(function: Function) -> _Patch:
    if function not in _patches:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return patch.target(*args, **kwargs)

        _patches[function] = patch = _Patch(wrapper, function)
    return _patches[function]
