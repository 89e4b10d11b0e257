"""The guard in front of flash_attn for models that import its functions by hand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from halftune.precision.guard import Guard
from halftune.precision.rebind import EntryPoint, installed, rebind, rebound

_in_place: dict[Callable[..., Any], Callable[..., Any]] = {}  # what ``patch`` put there → what was there


@contextmanager
def patched(guard: Guard, functions: Sequence[EntryPoint], rotary: Sequence[EntryPoint] = ()) -> Iterator[list[str]]:
    """Inside, the package's functions are guarded wherever a loaded module knows them; fully undone on exit.

    Args:
        guard: stands in front; one that is off changes nothing.
        functions: attention functions, by module and name. Boundaries of packed rows in int64 become int32.
        rotary: rotary helpers.

    Yields:
        ``module.name`` of each place; none where the package is not installed.
    """
    with rebound(_guarded(guard, functions, rotary)) as places:
        yield places


def patch(guard: Guard, functions: Sequence[EntryPoint], rotary: Sequence[EntryPoint] = ()) -> list[str]:
    """The same for the rest of the process; a later call replaces what an earlier one put there."""
    unpatch()
    replacements = _guarded(guard, functions, rotary)
    _in_place.update({replacement: original for original, replacement in replacements.items()})
    return rebind(replacements)


def unpatch() -> None:
    """Undoes ``patch``."""
    rebind(_in_place)
    _in_place.clear()


def _guarded(
    guard: Guard, functions: Sequence[EntryPoint], rotary: Sequence[EntryPoint]
) -> dict[Callable[..., Any], Callable[..., Any]]:
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for entry in functions if guard.mode != "off" else ():
        if (function := installed(entry)) is not None:
            found[function] = _int32_boundaries(guard.attention(function, entry.operands))
    for entry in rotary if guard.mode != "off" else ():
        if (function := installed(entry)) is not None:
            found[function] = guard.rotary(function)
    return found


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
