"""Reads a plain or LoRA-adapted linear layer as operator weights; None if it is not supported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from halftune.precision.trace.recorder import only_records
from halftune_kernels.ops.lora_linear import AdaptedWeight


def adapted_weight(module: nn.Module) -> AdaptedWeight | None:
    """The frozen weight and low-rank update of a linear layer, in their current state.

    None for unsupported layers: trained weights, DoRA and other variants, dropout, several adapters, a merged or
    disabled adapter, quantised or otherwise replaced layers, hooks.
    """
    if type(module) is LoraLinear:
        return _lora_weight(module)
    return AdaptedWeight(module.weight, _frozen(module.bias)) if _is_frozen_linear(module) else None


def _lora_weight(layer: Any) -> AdaptedWeight | None:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or not _is_low_rank_only(layer, active[0]):
        return None
    base, down, up = layer.base_layer, layer.lora_A[active[0]], layer.lora_B[active[0]]
    if not _is_frozen_linear(base) or not all(_is_plain_linear(part) and part.bias is None for part in (down, up)):
        return None
    return AdaptedWeight(base.weight, _frozen(base.bias), down.weight, up.weight, float(layer.scaling[active[0]]))


def _is_low_rank_only(layer: Any, name: str) -> bool:
    """Whether a LoRA layer only adds its low-rank product: not merged or disabled, no variant, dropout or hooks."""
    if layer.merged or layer.disable_adapters or layer.fan_in_fan_out or name in layer.lora_variant:
        return False
    return _has_no_hooks(layer) and (type(layer.lora_dropout[name]) is nn.Identity or not layer.training)


def _is_frozen_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is an unmodified ``nn.Linear`` that is not trained."""
    frozen = _is_plain_linear(module) and not module.weight.requires_grad
    return frozen and (module.bias is None or not module.bias.requires_grad)


def common_dtype(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> torch.dtype | None:
    """The dtype in which the layers' own code would compute on ``x``; None if dtypes would mix."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 else None
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias, layer.a, layer.b)]
    return x.dtype if all(tensor is None or tensor.dtype == x.dtype for tensor in tensors) else None


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is an unmodified ``nn.Linear`` with a plain weight."""
    plain = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, torch.Tensor)
    return plain and "forward" not in vars(module) and _has_no_hooks(module)


def _has_no_hooks(module: nn.Module) -> bool:
    """Whether a module has no hooks, except those of the dtype trace, which must not change a step."""
    if module._forward_pre_hooks or module._forward_hooks:
        looking = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(only_records, looking)):
            return False
    return not (module._backward_hooks or module._backward_pre_hooks)


def _frozen(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
