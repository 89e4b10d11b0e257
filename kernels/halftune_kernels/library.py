"""Registers functions as torch operators (``torch.ops.halftune.NAME``).

torch.compile, fake tensors, FSDP2 and activation checkpointing see such an operator as one node, with the shapes and
dtypes of its results, and never look inside. Registered once per process; the implementation is looked up at each call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, get_type_hints

import torch

NAMESPACE = "halftune"


def operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Any:
    """Register ``function`` for all devices under ``name``; returns the operator.

    Args:
        name: of the operator.
        function: with annotations, from which the schema follows. Its results share no memory with its arguments.
            One argument may be a named tuple: the operator takes its fields in that place.
        fake: of the same arguments: empty results.
        mutates: names of the arguments that it writes to.
    """
    full = f"{NAMESPACE}::{name}"
    function, fake = _of_fields(function, fake)
    schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
    torch.library.define(full, schema, tags=(torch.Tag.pt2_compliant_tag,))
    run = _counted(function, mutates) if mutates else function
    torch.library.impl(full, "CompositeExplicitAutograd")(_on_its_gpu(run))
    torch.library.register_fake(full)(fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _of_fields(function: Callable[..., Any], fake: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both with the fields of their argument that is a named tuple as arguments, since operators know no such types."""
    hints = get_type_hints(function)
    result, kinds = hints.pop("return"), list(hints.items())
    at = next((place for place, (_, kind) in enumerate(kinds) if hasattr(kind, "_fields")), None)
    if at is None:
        return function, fake
    call = kinds[at][1]
    kinds[at : at + 1] = get_type_hints(call).items()
    end = at + len(call._fields)

    def run(*args: Any) -> Any:
        return function(*args[:at], call(*args[at:end]), *args[end:])

    def run_fake(*args: Any) -> Any:
        return fake(*args[:at], call(*args[at:end]), *args[end:])

    flat = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in kinds]
    run.__signature__ = inspect.Signature(flat, return_annotation=result)  # type: ignore[attr-defined]
    return run, run_fake


def differentiable(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Register the backward pass of an operator; see ``torch.library.register_autograd``."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context)


def _counted(function: Callable[..., Any], mutates: Sequence[str]) -> Callable[..., Any]:
    """Count what a kernel writes as torch's own operators do: a second backward pass is an error, and not wrong."""
    names = list(inspect.signature(function).parameters)
    places = [names.index(name) for name in mutates]

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        result = function(*args)
        torch.autograd.graph.increment_version([args[place] for place in places])
        return result

    return run


def _on_its_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU: make that of the first tensor the current one."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        first = next(x for x in args if isinstance(x, torch.Tensor))
        if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return function(*args)
        return function(*args)

    return run


_everywhere: ContextVar[bool] = ContextVar("halftune_kernels_everywhere", default=False)


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Inside, CPUs call registered operators, too: what GPUs run, for tests."""
    token = _everywhere.set(True)
    try:
        yield
    finally:
        _everywhere.reset(token)


def opaque(x: torch.Tensor) -> bool:
    """Whether to call registered operators for ``x``: on GPUs, and wherever a graph is made.

    Elsewhere an autograd function does the same with less work per call.
    """
    return x.device.type != "cpu" or torch.compiler.is_compiling() or _everywhere.get()
