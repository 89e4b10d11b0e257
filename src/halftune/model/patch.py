"""Registers the plan's attention, behind the plan's guard, in transformers' attention interface; nothing is forked.

A model built with the returned name as its ``attn_implementation`` calls our callable in every layer. The names never
contain "flash": transformers would look such a name up on the hub.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, flash_attention_mask, flex_attention_mask, sdpa_mask

from halftune.attention.contract import ENTRY_POINTS, FLEX_ENTRY_POINT, ROTARY_ENTRY_POINT, EntryPoint, silent_hole
from halftune.attention.flash_in_torch import IN_TORCH
from halftune.attention.varlen import Attention, attention_callable
from halftune.core.errors import ModelError
from halftune.plan import Plan
from halftune.precision.guard import Guard
from halftune.precision.patched import hold_while_running, patched
from halftune.precision.rebind import Scope, as_installed, installed

_MASKS: dict[str, Callable[..., Any]] = {
    "sdpa": sdpa_mask,
    "eager": eager_mask,
    "flex": flex_attention_mask,
    "fa2": flash_attention_mask,
    "fa3": flash_attention_mask,
    "fa4": flash_attention_mask,
}

OWN = "eager"  # what transformers calls the attention of a model that does not go through its interface


@dataclass(frozen=True)
class Registration:
    """What stands behind a name in transformers' attention interface.

    Attributes:
        name: the ``attn_implementation``.
        guard: counts what it casts.
    """

    name: str
    guard: Guard


_registered: dict[tuple[Any, ...], Registration] = {}
_current: list[Registration] = []  # the latest last


def register_attention(plan: Plan) -> str:
    """Makes the plan's attention known to transformers.

    Every call starts a fresh guard, so that each run of a process has its own counters. Runs whose plans agree about
    attention share a name; other plans get names of their own, and models that were built with an earlier name keep
    their behaviour.

    A model that computes attention in code of its own (the plan's provider is ``model``) chooses among implementations
    that transformers names, and gets such a name; nothing is registered and the guard sees nothing.

    Returns:
        The ``attn_implementation`` to build the model with, e.g. ``halftune_sdpa``.

    Raises:
        MissingPackageError: the plan names a kernel package that is not installed.
    """
    attention, compute = plan.attention, plan.precision.compute.value
    if attention.provider.value == "model":
        _current.append(Registration(OWN, Guard(attention.guard, compute)))  # type: ignore[arg-type]
        return OWN
    routes = (attention.softmax.value, attention.provider.value, attention.varlen.value)
    key = (*routes, attention.guard, compute, plan.batch.packing.value)
    if key in _registered:
        name = _registered[key].name
    else:
        taken = {registration.name for registration in _registered.values()}
        stem = f"halftune_{attention.softmax.value}"
        names = (stem if number == 1 else f"{stem}_{number}" for number in range(1, len(taken) + 2))
        name = next(name for name in names if name not in taken)
    _registered[key] = registration = Registration(name, Guard(attention.guard, compute))  # type: ignore[arg-type]
    with as_installed():  # a model that is compiled may keep its guard before the package's functions
        attend = attention_callable(attention)
    mask = _MASKS[attention.softmax.value]
    if plan.batch.packing.value:
        announced = Announced()
        attend, mask = announced.attention(attend), announced.mask(mask)
    AttentionInterface.register(name, registration.guard.attention(attend))
    AttentionMaskInterface.register(name, mask)
    _current.append(registration)
    return name


def current_guard() -> Guard:
    """The guard of the latest registration.

    Raises:
        ModelError: no attention has been registered yet.
    """
    if not _current:
        raise ModelError("no attention is registered", remedy="load a model first")
    return _current[-1].guard


def is_unguarded() -> bool:
    """Whether the latest registration's guard is switched off."""
    return bool(_current) and _current[-1].guard.mode == "off"


def rehearsal() -> AbstractContextManager[None]:
    """For a forward pass that only looks at a model; see ``Guard.rehearsal``."""
    return _current[-1].guard.rehearsal() if _current else nullcontext()


def importing(*, own_code: bool) -> Scope:
    """While it is open, a model's code is imported: what it keeps of a function can be guarded wherever it keeps it."""
    functions = map(installed, (*_functions(own_code), ROTARY_ENTRY_POINT)) if _imports_by_hand(own_code) else ()
    return Scope({function: function for function in functions if function is not None})


def guard_imports_by_hand(model: nn.Module, *, own_code: bool = False) -> None:
    """Puts the current guard before the functions that a model imported by hand, whenever the model runs.

    These are flash_attn's, torch's flex and the operators of flash-linear-attention. Only where something has imported
    a package, or may: importing it costs seconds, and a model of transformers does not call it by itself. A plan in
    fp32 has flash_attn's functions computed in plain torch.

    Args:
        model: what calls them.
        own_code: the model brought its own code.
    """
    if _imports_by_hand(own_code):
        hold_while_running(guarded_imports(own_code=own_code), model)


def guarded_imports(*, own_code: bool = False) -> Scope:
    """The scope of ``guard_imports_by_hand``: while it is open, the current guard stands before those functions."""
    guard, functions = current_guard(), _functions(own_code)
    if guard.compute == "fp32":  # no kernel of the package takes it
        return patched(guard, functions, (ROTARY_ENTRY_POINT,), instead=IN_TORCH)
    return patched(guard, functions, (ROTARY_ENTRY_POINT,), refuse_silent_hole)


def _imports_by_hand(own_code: bool) -> bool:
    return own_code or not {"flash_attn", "flash_attn_interface"}.isdisjoint(sys.modules)


def _functions(own_code: bool) -> tuple[EntryPoint, ...]:
    return (*ENTRY_POINTS, FLEX_ENTRY_POINT) if own_code else ENTRY_POINTS


def refuse_silent_hole(query: torch.Tensor, dropout: float) -> None:
    """Stops a call whose gradients flash-attn would leave unwritten without a word.

    Raises:
        ModelError: this head size has no backward pass with dropout on this device.
    """
    capability, size = capability_of(query), query.shape[-1]
    if silent_hole(capability, size, dropout):
        shown = ".".join(map(str, capability or ()))
        what = f"flash-attn leaves gradients unwritten for head size {size} with dropout on compute capability {shown}"
        raise ModelError(what, remedy="set the model's attention dropout to 0, or take another device")


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the GPU that a tensor is on; None elsewhere."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def unregister_attention(name: str) -> None:
    """Takes a name of ours out of transformers' attention interface; models built with it can no longer run."""
    if name not in {registration.name for registration in _registered.values()}:
        return
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    for key in [key for key, registration in _registered.items() if registration.name == name]:
        del _registered[key]
    _current[:] = [registration for registration in _current if registration.name != name]


@contextmanager
def registered_attention(plan: Plan) -> Iterator[str]:
    """``register_attention`` for the length of a block; afterwards interface and current guard are as before."""
    before, current = dict(_registered), list(_current)
    interfaces = (AttentionInterface, AttentionMaskInterface)
    mappings = [(interface._global_mapping, dict(interface._global_mapping)) for interface in interfaces]
    try:
        yield register_attention(plan)
    finally:
        _registered.clear()
        _registered.update(before)
        _current[:] = current
        for mapping, entries in mappings:
            mapping.clear()
            mapping.update(entries)


class Announced:
    """Builds no mask for packed rows, and sees to it that every layer is told where the samples end.

    transformers finds packed rows by their position ids and would build a dense mask. The row's ``cu_seq_lens_q`` make
    it needless, but only if the model's layers hand them on to attention: one that does not would mix the samples.
    """

    def __init__(self) -> None:
        self._row_without_mask = False

    def mask(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """``build`` for everything but packed rows, which get None."""

        @functools.wraps(build)
        def mask_or_none(
            *,
            batch_size: int,
            q_length: int,
            kv_length: int,
            attention_mask: torch.Tensor | None = None,
            allow_is_causal_skip: bool = True,
            use_vmap: bool = False,
            **kwargs: Any,
        ) -> Any:
            # One row, no mask of the caller's, no cache, and yet plain causality is not enough: packed samples.
            row = batch_size == 1 and attention_mask is None and q_length == kv_length > 1
            self._row_without_mask = row and not allow_is_causal_skip and not use_vmap
            if self._row_without_mask:
                return None
            return build(
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                attention_mask=attention_mask,
                allow_is_causal_skip=allow_is_causal_skip,
                use_vmap=use_vmap,
                **kwargs,
            )

        return mask_or_none

    def attention(self, attend: Attention) -> Attention:
        """``attend``, which raises ModelError where a packed row arrives without boundaries or with a model's mask."""

        @functools.wraps(attend)
        def told(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            dropout: float = 0.0,
            scaling: float | None = None,
            **kwargs: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            untold = attention_mask is None and kwargs.get("cu_seq_lens_q") is None
            if self._row_without_mask and untold and getattr(module, "is_causal", True):
                raise ModelError(
                    f"{type(module).__name__} is not told where the samples of a packed row end",
                    remedy="data.packing: false",
                )
            if self._row_without_mask and attention_mask is not None:
                # The backends of packed rows take boundaries and no mask: what the model says with it would be lost.
                raise ModelError(
                    f"{type(module).__name__} brings a mask of its own to a packed row", remedy="data.packing: false"
                )
            return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)

        return told
