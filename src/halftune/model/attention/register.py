"""Registers the plan's attention, behind the plan's guard, in transformers' attention interface.

A model built with the returned ``attn_implementation`` calls our function in every layer. The names never
contain "flash": transformers would search the hub for it.

Two casts keep a model in its compute dtype: the operands of grouped expert matmuls (autocast has no rule for
``grouped_mm``, which would compute in fp32 at several times the cost), and the outputs of rotary embeddings and
query/key norms, which type promotion would widen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halftune.attention.backends import backend_of
from halftune.attention.contract import ENTRY_POINTS, FLEX_ENTRY_POINT, ROTARY_ENTRY_POINT, EntryPoint, lacks_backward
from halftune.attention.varlen import attention_callable
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.core.table import named
from halftune.model.attention.packed_rows import PackedRowMasks
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype
from halftune.precision.guard import Guard
from halftune.precision.patched import hold_while_running, patched
from halftune.precision.rebind import Scope, as_installed, installed

_QK_NORM = re.compile(r"(^|\.)(q|k|v|qk|query|key)_?(layer_?)?norm$")


def cast_qk_to_compute_dtype(model: nn.Module, plan: Plan) -> None:
    """Cast the outputs of rotary modules and query/key norms to the compute dtype under autocast.

    Cosines and sines are computed in fp32 and returned in the dtype of the hidden states: with fp32 master weights,
    ``q * cos`` would promote query and key to fp32 in every layer. A norm's fp32 weight has the same effect. Tables,
    weights and the norm's arithmetic stay fp32; only the outputs are rounded, as autocast would.
    """
    if not plan.precision.autocast.value:
        return
    cast = partial(_cast, torch_dtype(plan.precision.compute.value))
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RotaryEmbedding") or _QK_NORM.search(name):
            module.register_forward_hook(cast)


def _cast(compute: torch.dtype, _module: nn.Module, _inputs: tuple, output: Any) -> Any:
    """A forward hook: the output in the compute dtype; None, which keeps it, outside autocast."""
    tensors = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(tensor, torch.Tensor) and tensor.is_floating_point() for tensor in tensors):
        return None  # complex tables: the model casts the rotated result back
    if not torch.is_autocast_enabled(tensors[0].device.type):
        return None
    cast = tuple(tensor.to(compute) for tensor in tensors)
    return cast if isinstance(output, tuple) else cast[0]


log = get_logger(__name__)

NAME, GROUPED, LOOP = "halftune_grouped_mm", "grouped_mm", "eager"


def route_experts(model: nn.Module, plan: Plan) -> int:
    """Make grouped experts compute in autocast's dtype; returns the number of such layers.

    Does nothing without autocast. A loop over experts consists of linear layers, which autocast casts; other values of
    ``experts_implementation`` in config.json are overridden. Registers one entry in transformers' table of experts.
    """
    if not plan.precision.autocast.value:
        return 0
    experts: list[Any] = [module for module in model.modules() if "_is_expert_parallel" in vars(module)]
    grouped = [module for module in experts if module.config._experts_implementation not in (NAME, LOOP)]
    if grouped:
        ALL_EXPERTS_FUNCTIONS.register(NAME, in_autocast)
        for module in grouped:
            module.config._experts_implementation = NAME
    if experts:
        how, dtype = GROUPED if grouped else "a loop", plan.precision.compute.value
        log.info("experts of %d layers use %s in %s", len(experts), how, dtype)
    return len(grouped)


def in_autocast(
    module: nn.Module, hidden_NC: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """``grouped_mm`` with operands in autocast's dtype; the result has the dtype of ``hidden_NC``.

    Args:
        module: experts of one layer.
        hidden_NC: ``[N, C]`` tokens.
        chosen_NK: ``[N, K]`` expert indices of each token.
        weights_NK: ``[N, K]`` expert weights; the sum over experts has their dtype.
    """
    compute = ALL_EXPERTS_FUNCTIONS[GROUPED]
    kind = hidden_NC.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return compute(module, hidden_NC, chosen_NK, weights_NK)
    dtype = torch.get_autocast_dtype(kind)
    return compute(_Cast(module, dtype), hidden_NC.to(dtype), chosen_NK, weights_NK).to(hidden_NC.dtype)


class _Cast:
    """A view of a module with its floating parameters cast to another dtype; gradients reach the parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


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


_registered: dict[tuple[Any, ...], Registration] = {}
_current: list[Registration] = []  # the latest last


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
    with as_installed():  # a compiled model may still have guarded package functions
        attend = attention_callable(attention)
    mask = named(backend_of(attention.softmax.value, attention.provider.value).mask)
    if plan.batch.packing.value:
        packed_masks = PackedRowMasks()
        attend, mask = packed_masks.attention(attend), packed_masks.mask(mask)
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
        raise ModelError("no attention is registered", remedy="load a model first", code="model.wrong_use")
    return _current[-1].guard


def current_name() -> str:
    """The ``attn_implementation`` of the latest registration."""
    return _current[-1].name


def is_unguarded() -> bool:
    """Whether the latest registration's guard is off."""
    return bool(_current) and _current[-1].guard.mode == "off"


def probe_pass() -> AbstractContextManager[None]:
    """Context of a forward pass that only inspects a model; see ``Guard.probe_pass``."""
    return _current[-1].guard.probe_pass() if _current else nullcontext()


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
