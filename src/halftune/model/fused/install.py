"""Finds the layers of a model that an operator computes, proves each kind on random input, and gives them its forward.

Only instances change: their ``forward`` attribute, which ``FusedLayers.remove`` takes away again. Names of weights,
classes and other models stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.utils.hooks import RemovableHandle

from halftune.model.fused import mlp, norm
from halftune.model.fused.linear import adapted_weight
from halftune.model.fused.projections import SHARING, FusedProjection, Projections

# What third-party layers raise that want other arguments than one tensor, or other shapes than they seem to.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
_ROWS, _SIZES = 5, (0.1, 1.0, 10.0)  # of the random inputs
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Forward = Callable[..., Any]


@dataclass
class FusedLayers:
    """What was changed in a model.

    Attributes:
        fused: layers by kind.
        left: layers of these kinds that keep their own code, by reason.
    """

    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    modules: list[nn.Module] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    def give(self, module: nn.Module, forward: Forward, kind: str) -> None:
        """Gives a module a forward of its own."""
        module.forward = forward
        self.modules.append(module)
        self.fused[kind] += 1

    def remove(self) -> None:
        """Gives every module the forward of its class back."""
        for module in self.modules:
            vars(module).pop("forward", None)
        for handle in self.handles:
            handle.remove()
        self.modules.clear()
        self.handles.clear()
        self.fused.clear()

    def __str__(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.fused.items())) or "none"
        left = "".join(f"; {count} {reason}" for reason, count in sorted(self.left.items()))
        return done + left


def fuse(model: nn.Module) -> FusedLayers:
    """Computes a model's norms, gated feed-forward layers and adapted linear layers by one operator each.

    Where a layer is unusual, now or later (DoRA, dropout, trained base weights, a merged, disabled or second adapter,
    quantised weights, hooks on its parts, other activations), its own code runs. Draws nothing from the global random
    state.

    Args:
        model: with its adapter, in its final dtypes and on its device.
    """
    done = FusedLayers()
    proven: dict[tuple[Any, ...], int | str] = {}
    inside: set[nn.Module] = set()  # layers that a fused one computes with
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if forms := norm.forms(module):
            forwards = [norm.FusedNorm(module, form).forward for form in forms]
            _try(done, module, forwards, proven, "norms", module.get_parameter("weight"))
        elif candidates := list(mlp.candidates(module)):
            if (weights := candidates[0].read()) is None:
                done.left["feed-forward layers with trained or unusual parts"] += 1
                continue
            forwards = [candidate.forward for candidate in candidates]
            if _try(done, module, forwards, proven, "feed-forward layers", weights[0].weight):
                inside.update(module.children())
    for parent in model.modules():
        _give_projections(done, parent, inside)
    return done


def _give_projections(done: FusedLayers, parent: nn.Module, inside: set[nn.Module]) -> None:
    """Fuses the adapted linear children of a module; query, key and value together."""
    children = {
        name: child for name, child in parent.named_children() if type(child) is LoraLinear and child not in inside
    }
    usual = {name: child for name, child in children.items() if adapted_weight(child) is not None}
    done.left["adapted linear layers with unusual parts"] += len(children) - len(usual)
    done.left += Counter()  # drops zeros
    together = [usual[name] for name in SHARING if name in usual]
    groups = [together] if together else []
    groups += [[child] for name, child in usual.items() if name not in SHARING]
    for layers in groups:
        projections = Projections(layers)
        if len(layers) > 1:
            done.handles += projections.watch(parent)
        for index, layer in enumerate(layers):
            done.give(layer, FusedProjection(projections, index).forward, "adapted linear layers")


def _try(
    done: FusedLayers,
    module: nn.Module,
    forwards: list[Forward],
    proven: dict[tuple[Any, ...], int | str],
    kind: str,
    weight: torch.Tensor,
) -> bool:
    """Gives a module the first of ``forwards`` that computes what its own does; layers alike are compared once.

    That a comparison failed says nothing about what the layer computes: such a reason is told apart, with the error.
    """
    sizes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    alike = (type(module), kind, sizes, _settings(module))
    if alike not in proven:
        proven[alike] = _first(module, forwards, weight)
    found = proven[alike]
    if isinstance(found, str):
        done.left[f"{kind} that {found} ({type(module).__name__})"] += 1
        return False
    done.give(module, forwards[found], kind)
    return True


def _first(module: nn.Module, forwards: list[Forward], weight: torch.Tensor) -> int | str:
    """The number of the first forward that computes what the module's own does, or why there is none."""
    errors, refusals = [], []
    for index, forward in enumerate(forwards):
        try:
            error, allowed = _error(module, forward, weight)
        except _REFUSALS as refusal:
            first_line = str(refusal).strip().partition("\n")[0][:120]
            refusals.append(f"could not be compared: {type(refusal).__name__}: {first_line}")
            continue
        if error <= allowed:
            return index
        errors.append(error)
    return f"compute something else, off by {min(errors):.2g}" if errors else refusals[0]


def _settings(module: nn.Module) -> tuple[str, ...]:
    """What a module computes with beside weights, its numbers and its activation: may differ from layer to layer."""
    chosen = [
        f"{name}={value!r}"
        for name, value in vars(module).items()
        if name[0] != "_" and (callable(value) or isinstance(value, (bool, int, float, str)))
    ]
    return (*chosen, *(repr(child) for child in module.children() if not any(True for _ in child.parameters())))


@torch.no_grad()
def _error(module: nn.Module, forward: Forward, weight: torch.Tensor) -> tuple[float, float]:
    """‖ours − own‖/‖own‖ of a forward on random rows of several sizes, and how large it may be; the first that is over.

    Where weights are of several formats (half precision with an fp32 adapter) the comparison is made under autocast, as
    training is: without it most layers refuse to mix them. A result of another shape or dtype is infinitely off.
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = {weight.dtype} if weight.ndim > 1 else {weight.dtype, torch.float32, torch.bfloat16}
    # The products that an activation sees are of these sizes, whatever the sizes of the weights: small ones look alike.
    gain = float(weight.double().norm()) / weight.shape[0] ** 0.5 if weight.ndim > 1 else 1.0
    formats = {parameter.dtype for parameter in module.parameters()}
    half = next((one for one in (torch.bfloat16, torch.float16) if one in formats), None) if len(formats) > 1 else None
    autocast = torch.autocast(weight.device.type, half, enabled=half is not None)
    modes = {part: part.training for part in module.modules()}
    module.eval()  # without dropout
    error, allowed = math.inf, 0.0
    try:
        for dtype in sorted(dtypes, key=str):
            allowed = _TOLERANCE[half or dtype]
            for size in _SIZES:
                x = size / (gain or 1.0) * torch.randn(1, _ROWS, weight.shape[-1], generator=generator)
                x = x.to(weight.device, dtype)
                with autocast:
                    own, ours = type(module).forward(module, x), forward(x)
                if own.dtype != ours.dtype or own.shape != ours.shape:
                    return math.inf, allowed
                error = float((own.double() - ours.double()).norm() / own.double().norm())
                if not error <= allowed:
                    return error, allowed
    finally:
        for part, mode in modes.items():
            part.training = mode
    return error, allowed
