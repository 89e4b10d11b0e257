"""Guards functions that models import directly: flash_attn's, torch's flex attention, flash-linear-attention's.

``flash_attn_with_kvcache`` writes caches in place: its operands are cast to the dtype of the caches.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halftune.precision.guard import Guard, returned
from halftune.precision.rebind import EntryPoint, Function, Scope, fla_operators, installed

OPERANDS = ("q", "k", "v", "rotary_cos", "rotary_sin")
"""Parameters of ``flash_attn_with_kvcache`` that must have the caches' dtype; all but q are optional."""
_CACHES = ("k_cache", "v_cache")
_SUPPORTED = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
Refusal = Callable[[torch.Tensor, float], None]  # (first operand, dropout); raises for unsupported calls
# Packages whose modules do not import attention functions directly: their model's forward opens the scope.
_NO_CODE_OF_ITS_OWN = ("torch", "transformers", "peft", "halftune")


def guard_cached(guard: Guard, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``flash_attn_with_kvcache`` (flash-attn 2 or 3) with a guard; the signature does not change.

    Raises, when called:
        DtypeContractError: the caches are fp32 or have different dtypes (writes to a cast copy would be lost); in
            ``strict`` mode, a cast is needed.
    """
    if guard.mode == "off":
        return function
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        operands = {name: arguments[name] for name in OPERANDS if isinstance(arguments.get(name), torch.Tensor)}
        caches = {name: arguments[name] for name in _CACHES}
        dtype = caches["k_cache"].dtype
        if dtype is not caches["v_cache"].dtype or dtype not in _SUPPORTED:
            guard.refuse_caches(function, caches | operands)
        if all(operand.dtype is dtype for operand in operands.values()):
            return function(*args, **kwargs)
        guard.note_cast(function, operands, dtype)
        cast = {name: operand.to(dtype) for name, operand in operands.items()}
        args_list = [cast.get(name, value) for name, value in zip(names, args, strict=False)]
        kwargs |= {name: operand for name, operand in cast.items() if name in kwargs}
        return returned(function(*args_list, **kwargs), list(operands.values()), dtype)

    return guarded


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
    if guard.mode == "off":
        return {}
    replacements: dict[Function, Function] = {}
    for entry in functions:
        if (function := installed(entry)) is not None:
            if "k_cache" in inspect.signature(function).parameters:
                replacements[function] = guard_cached(guard, function)
                continue
            called = instead.get(entry.name, function) if entry.module.startswith("flash_attn.") else function
            checked = called if refuse is None else _checked(called, entry.operands[0], refuse)
            replacements[function] = _int32_boundaries(guard.attention(checked, entry.operands))
    for entry in rotary:
        if (function := installed(entry)) is not None:
            replacements[function] = guard.rotary(function)
    return replacements | {function: guard.operator(function, operands) for function, operands in fla_operators()}


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
