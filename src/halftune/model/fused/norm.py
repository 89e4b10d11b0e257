"""Root-mean-square norms, with weights ``w`` or ``1 + w``, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halftune_kernels.rms_norm import rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class Form:
    """How a norm uses its weight: ``weight + offset``, and whether the result takes the promoted dtype of the two."""

    offset: float
    promotes: bool


def forms(module: nn.Module) -> list[Form]:
    """Forms that a module may have; only a comparison tells which. None for most modules."""
    parameters = dict(module.named_parameters(recurse=False))
    single = set(parameters) == {"weight"} and parameters["weight"].ndim == 1
    if not single or any(True for _ in module.children()) or _epsilon(module) is None:
        return []
    return [Form(offset, promotes) for offset in (0.0, 1.0) for promotes in (True, False)]


def forward(module: nn.Module, form: Form) -> Callable[..., Any]:
    """A forward by the operator, or by the layer's own code where something is unusual at the moment."""
    own, eps = module.forward, _epsilon(module)
    assert eps is not None

    def fused(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.compiler.is_compiling():
            return own(x, *args, **kwargs)
        weight = module.get_parameter("weight")
        dtype = torch.promote_types(x.dtype, weight.dtype) if form.promotes else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return rms_norm(x, weight, eps, offset=form.offset, dtype=dtype)

    return fused


def _epsilon(module: nn.Module) -> float | None:
    for name in _EPSILONS:
        value = vars(module).get(name)
        if isinstance(value, float):
            return value
    return None
