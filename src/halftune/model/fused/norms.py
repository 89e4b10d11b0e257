"""Root-mean-square norms of a model by fused operators: weights ``w`` or ``1 + w``, and with a gate."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from halftune.model.fused.projections import outside_autocast
from halftune.precision.record.recorder import copy_record, recorded
from halftune_kernels.ops.gated_rms_norm import gated_rms_norm
from halftune_kernels.ops.rms_norm import rms_norm

_EPSILONS = ("variance_epsilon", "eps", "epsilon")


def candidates(module: nn.Module) -> list[FusedNorm] | list[FusedGatedNorm]:
    """What may compute a module, to be verified by comparison; empty for most modules."""
    parameters = dict(module.named_parameters(recurse=False))
    single = set(parameters) == {"weight"} and parameters["weight"].ndim == 1
    if not single or any(True for _ in module.children()) or _epsilon(module) is None:
        return []
    if gated(module):
        group = _group(module, parameters["weight"].numel())
        forms = product(("silu", "sigmoid"), (True, False), (True, False))
        return [FusedGatedNorm(module, activation, first, promotes, group) for activation, first, promotes in forms]
    return [FusedNorm(module, Form(offset, promotes)) for offset, promotes in product((0.0, 1.0), (True, False))]


def gated(module: nn.Module) -> bool:
    """Whether a module's forward has a gate beside its input."""
    return "gate" in inspect.signature(type(module).forward).parameters


@dataclass(frozen=True)
class Form:
    """How a norm applies its weight: ``weight + offset``, and whether the result has the promoted dtype."""

    offset: float
    promotes: bool


class FusedNorm:
    """The replacement of a norm's forward: the operator, or the layer's own code if unsupported."""

    def __init__(self, module: nn.Module, form: Form) -> None:
        eps = _epsilon(module)
        assert eps is not None
        self.module, self.form, self.eps = module, form, eps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        module, form = self.module, self.form
        if len(args) != 1 or kwargs:
            return type(module).forward(module, *args, **kwargs)
        x: torch.Tensor = args[0]
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        dtype = torch.promote_types(x.dtype, weight.dtype) if form.promotes else x.dtype
        rounds = form.promotes and x.device.type != "cpu"  # on CPUs, where it costs time, rounded once
        with outside_autocast(x):
            out = rms_norm(x, weight, self.eps, offset=form.offset, dtype=dtype, rounds=rounds)
        return _noted(module, out, x)


class FusedGatedNorm:
    """As `FusedNorm`, of a norm with a gate: rounded once, where layers may round several times.

    Args:
        module: the norm.
        activation: of the gate, ``silu`` or ``sigmoid``.
        first: whether the norm comes before the gate.
        promotes: whether the result has the dtype that x and weight promote to.
        group: channels that are normalised together.
    """

    def __init__(self, module: nn.Module, activation: str, first: bool, promotes: bool, group: int) -> None:
        eps = _epsilon(module)
        assert eps is not None
        self.module, self.promotes = module, promotes
        self.how: dict[str, Any] = {
            "eps": eps,
            "activation": activation,
            "norm_before_gate": first,
            "group_size": group,
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        module = self.module
        given = [*args, *(kwargs[name] for name in kwargs if name == "gate")]
        if len(given) != 2 or len(args) + len(kwargs) != 2 or given[1] is None or given[0].shape != given[1].shape:
            return type(module).forward(module, *args, **kwargs)
        x, gate = given
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        dtype = torch.promote_types(x.dtype, weight.dtype) if self.promotes else x.dtype
        with outside_autocast(x):
            out = gated_rms_norm(x, weight, gate, dtype=dtype, **self.how)
        return _noted(module, out, x, gate)


def _noted(module: nn.Module, out: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    """``out``; where dtypes are recorded, with the record of the layer's own code."""
    if not torch.compiler.is_compiling() and recorded(module):
        with torch.no_grad():
            copy_record(out, type(module).forward(module, *given))
    return out


def _epsilon(module: nn.Module) -> float | None:
    for name in _EPSILONS:
        value = vars(module).get(name)
        if isinstance(value, float):
            return value
    return None


def _group(module: nn.Module, channels: int) -> int:
    """Channels that a gated norm takes together, by its attributes."""
    size, groups = vars(module).get("group_size"), vars(module).get("n_groups") or 1
    size = size if isinstance(size, int) else channels // groups
    return size if size > 0 and channels % size == 0 else channels
