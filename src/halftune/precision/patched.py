"""The guard in front of flash_attn for models that import its functions by hand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from halftune.precision.cached import guard_cached
from halftune.precision.guard import Guard
from halftune.precision.rebind import EntryPoint, Function, gated, installed

Refusal = Callable[[torch.Tensor, float], None]  # of the first operand and the dropout; raises where it must not be

_standing = ExitStack()  # what ``patch`` put there


@contextmanager
def patched(
    guard: Guard,
    functions: Sequence[EntryPoint],
    rotary: Sequence[EntryPoint] = (),
    refuse: Refusal | None = None,
    instead: Mapping[str, Function] | None = None,
) -> Iterator[list[str]]:
    """Inside, the package's functions are guarded wherever a loaded module knows them; fully undone on exit.

    Also where a model that is imported inside keeps one in a partial, a dict, a default argument or an attribute.

    Args:
        guard: stands in front; one that is off changes nothing.
        functions: attention functions, by module and name. Boundaries of packed rows in int64 become int32.
        rotary: rotary helpers.
        refuse: asked before every call with dropout that gradients may flow through.
        instead: by name, what is called in the place of an attention function of flash-attn 2.

    Yields:
        ``module.name`` of each place; none where the package is not installed.
    """
    with gated(_guarded(guard, functions, rotary, refuse, instead or {})) as places:
        yield places


def patch(
    guard: Guard,
    functions: Sequence[EntryPoint],
    rotary: Sequence[EntryPoint] = (),
    refuse: Refusal | None = None,
    instead: Mapping[str, Function] | None = None,
) -> list[str]:
    """The same for the rest of the process; a later call replaces what an earlier one put there."""
    unpatch()
    return _standing.enter_context(patched(guard, functions, rotary, refuse, instead))


def unpatch() -> None:
    """Undoes ``patch``."""
    _standing.close()


def _guarded(
    guard: Guard,
    functions: Sequence[EntryPoint],
    rotary: Sequence[EntryPoint],
    refuse: Refusal | None,
    instead: Mapping[str, Function],
) -> dict[Function, Function]:
    found: dict[Function, Function] = {}
    for entry in functions if guard.mode != "off" else ():
        if (function := installed(entry)) is not None:
            if "k_cache" in inspect.signature(function).parameters:
                found[function] = guard_cached(guard, function)
                continue
            called = instead.get(entry.name, function) if entry.module.startswith("flash_attn.") else function
            checked = called if refuse is None else _checked(called, entry.operands[0], refuse)
            found[function] = _int32_boundaries(guard.attention(checked, entry.operands))
    for entry in rotary if guard.mode != "off" else ():
        if (function := installed(entry)) is not None:
            found[function] = guard.rotary(function)
    return found


def _checked(function: Callable[..., Any], first: str, refuse: Refusal) -> Callable[..., Any]:
    """``function``, which asks ``refuse`` where it is called with dropout and gradients are wanted."""
    signature = inspect.signature(function)
    if "dropout_p" not in signature.parameters:
        return function
    at, operand = (list(signature.parameters).index(name) for name in ("dropout_p", first))

    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        dropout = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
        if dropout and torch.is_grad_enabled():
            refuse(args[operand] if operand < len(args) else kwargs[first], dropout)
        return function(*args, **kwargs)

    return asked


def _int32_boundaries(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its ``cu_seqlens…`` in the int32 that the kernel wants."""
    names = list(inspect.signature(function).parameters)
    places = [(at, name) for at, name in enumerate(names) if name.startswith("cu_seqlens")]
    if not places:
        return function

    @functools.wraps(function)
    def brought(*args: Any, **kwargs: Any) -> Any:
        args_list = list(args)
        for at, name in places:
            if at < len(args_list) and args_list[at].dtype is not torch.int32:
                args_list[at] = args_list[at].to(torch.int32)
            elif name in kwargs and kwargs[name].dtype is not torch.int32:
                kwargs[name] = kwargs[name].to(torch.int32)
        return function(*args_list, **kwargs)

    return brought
