"""Reads a linear layer, plain or adapted by peft, as an operator's weights; None where anything about it is unusual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from halftune.precision.trace.recorder import only_records
from halftune_kernels.ops.lora_linear import AdaptedWeight


def adapted_weight(module: nn.Module) -> AdaptedWeight | None:
    """The frozen weight of a linear layer with its low-rank update, as they are now.

    None where the layer computes anything else: trained weights, DoRA and other variants, dropout, several adapters, a
    merged or disabled one, quantised or otherwise replaced layers, hooks.
    """
    if type(module) is nn.Linear:
        plain = _undisturbed(module) and not module.weight.requires_grad
        return AdaptedWeight(module.weight, _frozen(module.bias)) if plain and _frozen_or_none(module.bias) else None
    if type(module) is not LoraLinear or not _watched_by_nobody(module):
        return None
    layer: Any = module
    base, active = layer.base_layer, [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or layer.disable_adapters or len(active) != 1:
        return None
    (name,) = active
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    idle = type(dropout) is nn.Identity or not layer.training
    simple = idle and name not in layer.lora_variant and not layer.fan_in_fan_out
    if not simple or not all(map(_undisturbed, (base, down, up))) or down.bias is not None or up.bias is not None:
        return None
    if base.weight.requires_grad or not _frozen_or_none(base.bias):
        return None
    return AdaptedWeight(base.weight, _frozen(base.bias), down.weight, up.weight, float(layer.scaling[name]))


def fits(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> torch.dtype | None:
    """The dtype in which the layers' own code would compute on ``x``; None where they would mix formats."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 else None
    tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias, layer.a, layer.b)]
    return x.dtype if all(tensor is None or tensor.dtype == x.dtype for tensor in tensors) else None


def _undisturbed(module: nn.Module) -> bool:
    """Whether calling the module is torch's product with a plain weight, and nothing else."""
    plain = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, torch.Tensor)
    return plain and "forward" not in vars(module) and _watched_by_nobody(module)


def _watched_by_nobody(module: nn.Module) -> bool:
    """No hooks but those of the dtype trace, which only look: a step must not depend on whether it is recorded."""
    if module._forward_pre_hooks or module._forward_hooks:
        looking = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(only_records, looking)):
            return False
    return not (module._backward_hooks or module._backward_pre_hooks)


def _frozen_or_none(bias: torch.Tensor | None) -> bool:
    return bias is None or not bias.requires_grad


def _frozen(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
