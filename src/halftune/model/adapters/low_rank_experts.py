"""Multiplies LoRA on fused experts beside their weights; peft adds B·A to a copy of all weights in each pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.utils import parametrize

from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.model.attention.experts import LowRank, grouped_experts, is_grouped, is_routed, route

log = get_logger(__name__)


@contextmanager
def unquantised_names(model: torch.nn.Module) -> Iterator[None]:
    """Inside, quantised experts seem to hold plain weights: peft finds them and nests its adapters as it does on those.

    The weights then have shape, dtype and device, but no values.
    """
    hidden: list[tuple[torch.nn.Module, tuple[str, ...], torch.nn.Module | None]] = []
    for module in grouped_experts(model):
        if parametrize.is_parametrized(module):
            # in the order of models' code, which is that of nesting: gate and up before down
            weights = {name: getattr(module, name) for name in sorted(module.parametrizations, reverse=True)}
            hidden.append((module, tuple(weights), module._modules.pop("parametrizations")))
            for name, weight in weights.items():
                module._parameters[name] = torch.nn.Parameter(weight.new_empty(()).expand(weight.shape), False)
    try:
        yield
    finally:
        for module, names, packed in hidden:
            for name in names:
                del module._parameters[name]
            module._modules["parametrizations"] = packed


def multiply_beside_weights(adapted: torch.nn.Module) -> int:
    """Let adapters on fused experts be multiplied beside the weights where that is possible; returns how many are.

    The adapter's parameters, their names, merging and saving stay peft's.

    Raises:
        ConfigError: it is not possible, and the weights are quantised.
    """
    wrappers = [module for module in adapted.modules() if isinstance(module, ParamWrapper)]
    if not wrappers:
        return 0
    route(grouped_experts(adapted))
    ours = [one for one in wrappers if _is_possible(one)]
    for wrapper in ours:
        wrapper._activate_lora = MethodType(_activated, wrapper)
    if left := [one for one in wrappers if one not in ours]:
        if any(parametrize.is_parametrized(one.get_base_layer()) for one in left):
            what, remedy = "peft cannot add B·A to quantised experts", "set model.quantize_experts: false"
            raise ConfigError(what, where="adapter.target_parameters", remedy=remedy, code="config.keys_conflict")
        log.info("%d weights of experts are no operands of grouped_mm: W + B·A is computed in each pass", len(left))
    return len(ours)


def _is_possible(wrapper: ParamWrapper) -> bool:
    """Whether ``grouped_mm`` multiplies a weight, which is not of 8 bits."""
    experts: Any = wrapper.get_base_layer()
    if not (is_grouped(experts) and is_routed(experts)):
        return False
    operands = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    return wrapper.parameter_name in operands and wrapper.get_param().dtype.itemsize > 1


@contextmanager
def _activated(wrapper: ParamWrapper, active: list[str]) -> Iterator[None]:
    """Replaces peft's ``_activate_lora``, which remains for several adapters and where experts compute otherwise."""
    experts: Any = wrapper.get_base_layer()
    adapters = [one for one in active if one in wrapper.lora_A]
    if len(adapters) != 1 or not is_routed(experts):
        with ParamWrapper._activate_lora(wrapper, active):
            yield
        return
    (adapter,) = adapters
    factors: list[Any] = [wrapper.lora_A[adapter], wrapper.lora_B[adapter]]
    a, b = (one.weight for one in factors)  # [E·rank, in], [out, rank·E]
    b_ERO = b.unflatten(1, (-1, wrapper.num_experts)).permute(2, 1, 0)
    a_ERI = a.unflatten(0, (wrapper.num_experts, -1))
    experts.low_rank[wrapper.parameter_name] = LowRank(a_ERI, b_ERO * wrapper.scaling[adapter])
    try:
        yield
    finally:
        del experts.low_rank[wrapper.parameter_name]
