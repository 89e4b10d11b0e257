"""Fused RMS norms, with weights ``w`` or ``1 + w``, recognised by their results."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halftune.precision.trace.recorder import copy_record, recorded
from halftune_kernels.ops.rms_norm import rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class Form:
    """How a norm applies its weight: ``weight + offset``, and whether the result has the promoted dtype."""

    offset: float
    promotes: bool


def forms(module: nn.Module) -> list[Form]:
    """Candidate forms of a module, to be verified by comparison; empty for most modules and for gated norms."""
    parameters = dict(module.named_parameters(recurse=False))
    single = set(parameters) == {"weight"} and parameters["weight"].ndim == 1
    if not single or any(True for _ in module.children()) or _epsilon(module) is None:
        return []
    if "gate" in inspect.signature(type(module).forward).parameters:
        return []
    return [Form(offset, promotes) for offset in (0.0, 1.0) for promotes in (True, False)]


class FusedNorm:
    """The replacement of a norm's forward: the operator, or the layer's own code if unsupported."""

    def __init__(self, module: nn.Module, form: Form) -> None:
        eps = _epsilon(module)
        assert eps is not None
        self.module, self.form, self.eps = module, form, eps

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        module = self.module
        if args or kwargs or torch.compiler.is_compiling():
            return type(module).forward(module, x, *args, **kwargs)
        weight = module.get_parameter("weight")
        dtype = torch.promote_types(x.dtype, weight.dtype) if self.form.promotes else x.dtype
        with torch.autocast(x.device.type, enabled=False):
            out = rms_norm(x, weight, self.eps, offset=self.form.offset, dtype=dtype)
        if recorded(module):
            with torch.no_grad():
                copy_record(out, type(module).forward(module, x))
        return out


def _epsilon(module: nn.Module) -> float | None:
    for name in _EPSILONS:
        value = vars(module).get(name)
        if isinstance(value, float):
            return value
    return None
