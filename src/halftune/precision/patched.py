"""Guards functions that models import directly: flash_attn's, torch's flex attention, flash-linear-attention's."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halftune.precision.cached import guard_cached
from halftune.precision.guard import Guard
from halftune.precision.rebind import EntryPoint, Function, Scope, fla_operators, installed

Refusal = Callable[[torch.Tensor, float], None]  # (first operand, dropout); raises for unsupported calls
# Packages whose modules do not import attention functions directly: their model's forward opens the scope.
_NO_CODE_OF_ITS_OWN = ("torch", "transformers", "peft", "halftune")


def patched(
    guard: Guard,
    functions: Sequence[EntryPoint],
    rotary: Sequence[EntryPoint] = (),
    refuse: Refusal | None = None,
    instead: Mapping[str, Function] | None = None,
) -> Scope:
    """Return a scope that guards the packages' functions in all loaded modules while it is open.

    Includes flash-linear-attention's operators if it is loaded.

    Args:
        guard: the guard; with mode ``off`` nothing is patched.
        functions: attention functions. int64 boundaries of packed rows are cast to int32.
        rotary: rotary functions.
        refuse: called before every call with dropout and gradients enabled.
        instead: replacements of flash-attn 2's attention functions, by name.
    """
    return Scope(_guarded(guard, functions, rotary, refuse, instead or {}))


def hold_while_running(scope: Scope, model: nn.Module) -> None:
    """Open a scope only while ``model`` runs.

    That is in its forward, in submodules with their own code that are called directly, and in the backward pass, where
    gradient checkpointing recomputes. Compiled code keeps the functions it was compiled with: the scope then stays open
    from the first such call for the model's lifetime.
    """
    if not scope.replaces:
        return
    running = _Running(scope, model)
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _keep_open(running.number)
            return forward(*args, **kwargs)
        running.enter()
        try:
            output = forward(*args, **kwargs)
        finally:
            running.leave()
        running.follow(output)
        return output

    model.forward = scoped
    # Hooks, since a copied module (peft) must not call the original's forward. Modules without children are norms.
    parts = [part for part in model.modules() if part is not model and next(part.children(), None) is not None]
    for part in parts:
        if type(part).__module__.partition(".")[0] not in _NO_CODE_OF_ITS_OWN:
            part.register_forward_pre_hook(running.before)
            part.register_forward_hook(running.after, always_call=True)


class _Running:
    """Opens and closes a model's scope as the model runs."""

    def __init__(self, scope: Scope, model: nn.Module) -> None:
        self.scope, self._model = scope, weakref.ref(model)
        self._backward = False  # whether it is open for a backward pass
        self._kept_open = False
        self.number = len(_models)
        _models.append(weakref.ref(self))

    def enter(self) -> None:
        if self._backward and torch._C._current_graph_task_id() < 0:  # a failed backward pass runs no callback
            self._end_backward()
        self.scope.__enter__()

    def leave(self) -> None:
        self.scope.__exit__()

    def before(self, _module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter()

    def after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.leave()
            self.follow(output)

    def follow(self, output: Any) -> None:
        """Open the scope when a backward pass reaches ``output``, until the pass ends."""
        if self.scope.is_open or not torch.is_grad_enabled():
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def keep_open(self) -> None:
        model = self._model()
        if model is not None and not self._kept_open:
            self._kept_open = True
            self.scope.__enter__()
            weakref.finalize(model, self.scope.__exit__).atexit = False

    def _begin_backward(self, _gradient: torch.Tensor) -> None:
        if not self._backward:
            self._backward = True
            self.scope.__enter__()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._backward:
            self._backward = False
            self.scope.__exit__()


_models: list[weakref.ref[_Running]] = []  # by number: constants in a graph can be numbers, not objects


def _keep_open(number: int) -> None:
    """Keep a model's scope open; torch runs this while it compiles a graph."""
    running = _models[number]()
    if running is not None:
        running.keep_open()


_keep_open._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the decorator would import torch._dynamo: seconds


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


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
    for function, operands in fla_operators() if guard.mode != "off" else ():
        found[function] = guard.operator(function, operands)
    return found


def _checked(function: Callable[..., Any], first: str, refuse: Refusal) -> Callable[..., Any]:
    """Wrap ``function`` to call ``refuse`` first if dropout and gradients are enabled."""
    signature = inspect.signature(function)
    if "dropout_p" not in signature.parameters:
        return function
    at, operand = (list(signature.parameters).index(name) for name in ("dropout_p", first))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        dropout = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
        if dropout and torch.is_grad_enabled():
            refuse(args[operand] if operand < len(args) else kwargs[first], dropout)
        return function(*args, **kwargs)

    return checked


def _int32_boundaries(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to cast its ``cu_seqlens…`` to int32, which the kernel requires."""
    names = list(inspect.signature(function).parameters)
    places = [(at, name) for at, name in enumerate(names) if name.startswith("cu_seqlens")]
    if not places:
        return function

    @functools.wraps(function)
    def with_int32(*args: Any, **kwargs: Any) -> Any:
        args_list = list(args)
        for at, name in places:
            if at < len(args_list) and args_list[at].dtype is not torch.int32:
                args_list[at] = args_list[at].to(torch.int32)
            elif name in kwargs and kwargs[name].dtype is not torch.int32:
                kwargs[name] = kwargs[name].to(torch.int32)
        return function(*args_list, **kwargs)

    return with_int32
