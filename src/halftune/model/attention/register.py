"""Registers the plan's attention, behind the plan's guard, in transformers' attention interface.

A model built with the returned ``attn_implementation`` calls our function in every layer. The names never
contain "flash": transformers would search the hub for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from halftune.attention.backends import backend_of
from halftune.attention.contract import ENTRY_POINTS, FLEX_ENTRY_POINT, ROTARY_ENTRY_POINT, EntryPoint, lacks_backward
from halftune.attention.varlen import attention_callable
from halftune.core.errors import ModelError
from halftune.core.table import named
from halftune.model.attention.packed_rows import PackedRowMasks
from halftune.plan import Plan
from halftune.precision.guard import Guard
from halftune.precision.patched import hold_while_running, patched
from halftune.precision.rebind import Scope, as_installed, installed

OWN = "eager"  # the attn_implementation of models that do not use transformers' interface


@dataclass(frozen=True)
class Registration:
    """An entry in transformers' attention interface.

    Attributes:
        name: the ``attn_implementation``.
        guard: the dtype guard of the entry.
    """

    name: str
    guard: Guard


_registered: dict[tuple[Any, ...], Registration] = {}  # the latest last


def register_attention(plan: Plan) -> str:
    """Register the plan's attention with transformers.

    Every call creates a new guard, so that each run in a process has its own counters. Plans with equal attention share
    a name; models built with an earlier name keep their behaviour.

    A model with its own attention code (provider ``model``) gets one of transformers' names; nothing is registered and
    the guard sees no calls.

    Returns:
        The ``attn_implementation`` to build the model with, e.g. ``halftune_sdpa``.

    Raises:
        MissingPackageError: the plan names a kernel package that is not installed.
    """
    attention, compute = plan.attention, plan.precision.compute.value
    routes = (attention.softmax.value, attention.provider.value, attention.varlen.value)
    key = (*routes, attention.guard, compute, plan.batch.packing.value)
    guard = Guard(attention.guard, compute)  # type: ignore[arg-type]
    if attention.provider.value == "model":
        name = OWN
    else:
        name = _registered[key].name if key in _registered else _unused_name(attention.softmax.value)
        _register(name, guard, plan)
    _registered.pop(key, None)
    _registered[key] = Registration(name, guard)
    return name


def _unused_name(softmax: str) -> str:
    taken = {registration.name for registration in _registered.values()}
    numbered = (f"halftune_{softmax}_{number}" for number in count(2))
    return next(name for name in chain([f"halftune_{softmax}"], numbered) if name not in taken)


def _register(name: str, guard: Guard, plan: Plan) -> None:
    with as_installed():  # a compiled model may still have guarded package functions
        attend = attention_callable(plan.attention)
    mask = named(backend_of(plan.attention.softmax.value, plan.attention.provider.value).mask)
    if plan.batch.packing.value:
        packed_masks = PackedRowMasks()
        attend, mask = packed_masks.attention(attend), packed_masks.mask(mask)
    AttentionInterface.register(name, guard.attention(attend))
    AttentionMaskInterface.register(name, mask)


def _latest() -> Registration | None:
    return next(reversed(_registered.values()), None)


def current_guard() -> Guard:
    """The guard of the latest registration.

    Raises:
        ModelError: no attention has been registered yet.
    """
    if (latest := _latest()) is None:
        raise ModelError("no attention is registered", remedy="load a model first", code="model.wrong_use")
    return latest.guard


def is_unguarded() -> bool:
    """Whether the latest registration's guard is off."""
    latest = _latest()
    return latest is not None and latest.guard.mode == "off"


def probe_pass() -> AbstractContextManager[None]:
    """Context of a forward pass that only inspects a model; see ``Guard.probe_pass``."""
    latest = _latest()
    return nullcontext() if latest is None else latest.guard.probe_pass()


def importing(*, remote_code: bool) -> Scope:
    """The scope for importing a model's code, so that its references to attention functions can be guarded later."""
    functions = map(installed, (*_functions(remote_code), ROTARY_ENTRY_POINT)) if _imports_by_hand(remote_code) else ()
    return Scope({function: function for function in functions if function is not None})


def guard_imported_kernels(model: nn.Module, *, remote_code: bool = False) -> None:
    """Guard the kernel functions that a model's code imports directly, whenever the model runs.

    These are flash_attn's functions, torch's flex attention and the operators of flash-linear-attention. Skipped if no
    package was imported: importing costs seconds, and transformers' models do not call them directly. With an fp32
    plan, flash_attn's functions run in plain torch.

    Args:
        model: the model that calls them.
        remote_code: whether the model has remote code.
    """
    if _imports_by_hand(remote_code):
        hold_while_running(guarded_imports(remote_code=remote_code), model)


def guarded_imports(*, remote_code: bool = False) -> Scope:
    """The scope of ``guard_imported_kernels``: while it is open, the current guard wraps those functions."""
    guard, functions = current_guard(), _functions(remote_code)
    if guard.compute == "fp32":  # the package has no fp32 kernels
        from halftune.attention.flash_in_torch import IN_TORCH

        return patched(guard, functions, (ROTARY_ENTRY_POINT,), instead=IN_TORCH)
    return patched(guard, functions, (ROTARY_ENTRY_POINT,), refuse_missing_backward)


def _imports_by_hand(remote_code: bool) -> bool:
    return remote_code or not {"flash_attn", "flash_attn_interface"}.isdisjoint(sys.modules)


def _functions(remote_code: bool) -> tuple[EntryPoint, ...]:
    return (*ENTRY_POINTS, FLEX_ENTRY_POINT) if remote_code else ENTRY_POINTS


def refuse_missing_backward(query: torch.Tensor, dropout: float) -> None:
    """Refuse a call for which flash-attn silently leaves gradients unwritten.

    Raises:
        ModelError: no backward pass for this head size with dropout on this device.
    """
    capability, size = capability_of(query), query.shape[-1]
    if lacks_backward(capability, size, dropout):
        shown = ".".join(map(str, capability or ()))
        what = f"flash-attn leaves gradients unwritten for head size {size} with dropout on compute capability {shown}"
        raise ModelError(
            what,
            remedy="set the model's attention dropout to 0, or use another device",
            code="attention.kernel_lacks_feature",
        )


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of a tensor's GPU; None for other devices."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


@contextmanager
def registered_attention(plan: Plan) -> Iterator[str]:
    """``register_attention`` inside a block; restores the interface and the current guard afterwards."""
    before = dict(_registered)
    interfaces = (AttentionInterface, AttentionMaskInterface)
    mappings = [(interface._global_mapping, dict(interface._global_mapping)) for interface in interfaces]
    try:
        yield register_attention(plan)
    finally:
        _registered.clear()
        _registered.update(before)
        for mapping, entries in mappings:
            mapping.clear()
            mapping.update(entries)
