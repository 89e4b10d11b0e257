"""Finds layers that a fused operator can compute, verifies each kind on random input, and replaces their forward.

Only the ``forward`` attribute of instances changes; ``FusedLayers.remove`` restores it. Weight names, classes and other
models do not change. RMS norms, with weights ``w`` or ``1 + w``, are recognised by their results.

In: a loaded model.
Out: the same model, with layers computed by fused operators; reversible.
Imported by: `bench`, `train`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from halftune.model.fused import norms, projections
from halftune.model.fused.projections import (
    SHARING,
    FusedProjection,
    Projections,
    adapted_weight,
    is_lora_linear,
)
from halftune_kernels.library import opaque

# Errors of third-party layers with other arguments or shapes than assumed.
_REFUSALS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
_ROWS, _SIZES = 5, (0.1, 1.0, 10.0)  # of the random inputs
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

Forward = Callable[..., Any]


@dataclass
class FusedLayers:
    """The fused layers of a model.

    Attributes:
        fused: layers by kind.
        left: unfused layers of these kinds, by reason.
    """

    fused: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    modules: list[nn.Module] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    rebound: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def set_forward(self, module: nn.Module, forward: Forward, kind: str) -> None:
        """Replace a module's forward."""
        module.forward = forward
        self.modules.append(module)
        self.fused[kind] += 1

    def remove(self) -> None:
        """Restore every module's forward, and rebound functions."""
        for module in self.modules:
            vars(module).pop("forward", None)
        for handle in self.handles:
            handle.remove()
        for namespace, name, own in self.rebound:
            namespace[name] = own
        self.rebound.clear()
        self.modules.clear()
        self.handles.clear()
        self.fused.clear()

    def __str__(self) -> str:
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.fused.items())) or "none"
        left = "".join(f"; {count} {reason}" for reason, count in sorted(self.left.items()))
        return done + left


def fuse(model: nn.Module, like: nn.Module | None = None) -> FusedLayers:
    """Fuse a model's norms, gated feed-forward layers and adapted linear layers; on GPUs its rotary embeddings, too.

    Unsupported layers, checked at every call, run their own code: DoRA, dropout, trained base weights, a merged,
    disabled or second adapter, quantised weights other than those of 4 bits on GPUs, hooks, other activations. Of
    unsupported feed-forward layers GPUs compute the activation. The global random state does not change.

    Args:
        model: with its adapter, in its final dtypes and on its device.
        like: a small copy with numbers on the CPU, whose layers of the same names are compared instead of those of a
            model without.
    """
    done, everything = FusedLayers(), any(map(opaque, model.parameters()))
    twins = {} if like is None else dict(like.named_modules())
    proven: dict[tuple[Any, ...], int | str] = {}
    inside: set[nn.Module] = set()  # layers inside a fused layer
    for name, module in [(name, one) for name, one in model.named_modules() if "forward" not in vars(one)]:
        twin = twins.get(name, module)
        if norms.candidates(module):
            kind, operator = ("gated norms", "gated_rms_norm") if norms.gated(module) else ("norms", "rms_norm")
            _try(done, module, twin, _norms, proven, kind, operator)
        elif candidates := list(projections.mlp_candidates(module, everything)):
            inside |= _fuse_mlp(done, module, twin, proven, candidates[0], everything=everything)
    for parent in model.modules():
        _fuse_projections(done, parent, inside)
    if everything:
        _fuse_rotary(done, model)
    return done


def _fuse_mlp(
    done: FusedLayers,
    module: nn.Module,
    twin: nn.Module,
    proven: dict[tuple[Any, ...], int | str],
    first: projections.FusedMlp,
    *,
    everything: bool,
) -> set[nn.Module]:
    """Fuse a gated feed-forward layer; returns the layers that are computed inside."""
    weights, kind = first.parts(), "feed-forward layers"
    if weights is None and not everything:
        done.left[f"{kind} with trained or unsupported parts"] += 1
        return set()
    make = partial(_mlps, everything=everything)
    fused = _try(done, module, twin, make, proven, kind, "gated_activation")
    return set(module.children()) if fused and weights is not None else set()


def _norms(module: nn.Module) -> tuple[list[Forward], torch.Tensor]:
    """The candidates for a norm, and its weight."""
    return [candidate.forward for candidate in norms.candidates(module)], module.get_parameter("weight")


def _mlps(module: nn.Module, *, everything: bool) -> tuple[list[Forward], torch.Tensor]:
    """The candidates for a gated feed-forward layer, and the weight that reads its input."""
    candidates = list(projections.mlp_candidates(module, everything))
    return [candidate.forward for candidate in candidates], candidates[0].first_weight()


def _fuse_rotary(done: FusedLayers, model: nn.Module) -> None:
    """Rebind the rotary embedding of a model's modeling files."""
    kind = "rotary embeddings"
    if why := without_kernel("rope", next(model.parameters())):
        done.left[f"{kind} ({why})"] += 1
        return
    from halftune.model.fused import rotary  # for GPUs

    for namespace, own in rotary.rebind(model):
        if own is None:
            done.left[f"{kind} that compute something else"] += 1
        else:
            done.rebound.append((namespace, rotary.NAME, own))
            done.fused[kind] += 1


def without_kernel(operator: str, weight: torch.Tensor) -> str:
    """Why an operator has no kernel for weights on a GPU; empty if it has one, proven on this machine, and on CPUs."""
    if weight.device.type != "cuda" or isinstance(weight, FakeTensor) or isinstance(weight.data, FakeTensor):
        return ""
    from halftune_kernels.dispatch import choose

    backend = choose(operator, weight.device, weight.dtype)
    return "" if backend.name == "triton" else backend.reason


def _fuse_projections(done: FusedLayers, parent: nn.Module, inside: set[nn.Module]) -> None:
    """Fuse the adapted linear children of a module; those that read one input as one group."""
    children = {name: child for name, child in parent.named_children() if is_lora_linear(child) and child not in inside}
    usual = {name: child for name, child in children.items() if adapted_weight(child) is not None}
    done.left["adapted linear layers with unsupported parts"] += len(children) - len(usual)
    done.left += Counter()  # drops zeros
    for layers in _groups(usual):
        projections = Projections(layers)
        if len(layers) > 1:
            done.handles += projections.watch(parent)
        for index, layer in enumerate(layers):
            done.set_forward(layer, FusedProjection(projections, index).forward, "adapted linear layers")


def _groups(layers: dict[str, nn.Module]) -> list[list[nn.Module]]:
    """Layers that are computed together; every other one alone."""
    together = [[layers[name] for name in names if name in layers] for names in SHARING]
    shared = set(chain.from_iterable(SHARING))
    return [*filter(None, together), *([layer] for name, layer in layers.items() if name not in shared)]


def _try(
    done: FusedLayers,
    module: nn.Module,
    twin: nn.Module,
    make: Callable[[nn.Module], tuple[list[Forward], torch.Tensor]],
    proven: dict[tuple[Any, ...], int | str],
    kind: str,
    operator: str,
) -> bool:
    """Replace a module's forward by the first candidate whose results equal those of ``twin``, the module or its like.

    Equal layers are compared once. A comparison that raises is reported separately, with its error.
    """
    forwards, weight = make(module)
    if why := without_kernel(operator, weight):
        done.left[f"{kind} ({why})"] += 1
        return False
    sizes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    alike = (type(module), kind, sizes, _settings(module))
    if alike not in proven:
        proven[alike] = _first(twin, *make(twin))
    found = proven[alike]
    if isinstance(found, str):
        done.left[f"{kind} that {found} ({type(module).__name__})"] += 1
        return False
    done.set_forward(module, forwards[found], kind)
    return True


def _first(module: nn.Module, forwards: list[Forward], weight: torch.Tensor) -> int | str:
    """Index of the first candidate with equal results, or the reason why no candidate matches."""
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
    """A module's settings besides weights (numbers, activation), which may differ between layers."""
    chosen = [
        f"{name}={value!r}"
        for name, value in vars(module).items()
        if name[0] != "_" and (callable(value) or isinstance(value, (bool, int, float, str)))
    ]
    return (*chosen, *(repr(child) for child in module.children() if not any(True for _ in child.parameters())))


@torch.no_grad()
def _error(module: nn.Module, forward: Forward, weight: torch.Tensor) -> tuple[float, float]:
    """‖ours − own‖/‖own‖ on random rows of several scales, and its tolerance; returns the first failure.

    Weights of mixed dtypes (half precision with an fp32 adapter) are compared under autocast, as in training. A result
    with another shape or dtype counts as an infinite error.
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = {weight.dtype} if weight.ndim > 1 else {weight.dtype, torch.float32, torch.bfloat16, torch.float16}
    # Scale inputs so that activations get products of these sizes: for small inputs, activations are too similar.
    gain = float(weight.double().norm()) / weight.shape[0] ** 0.5 if weight.ndim > 1 else 1.0
    half = _half_of_mixed(module)
    error, allowed = math.inf, 0.0
    with _own_dropout_only(module, weight.device), torch.autocast(weight.device.type, half, enabled=half is not None):
        # sorted: in a set's order the generator would give other inputs in each process
        for dtype, size in product(sorted(dtypes, key=str), _SIZES):
            allowed = _TOLERANCE[half or dtype]
            x = size / (gain or 1.0) * torch.randn(1, _ROWS, weight.shape[-1], generator=generator)
            given = [x.to(weight.device, dtype)]
            if norms.gated(module):
                given += [torch.randn(x.shape, generator=generator).to(weight.device, dtype)]
            own, ours = type(module).forward(module, *given), forward(*given)
            if own.dtype != ours.dtype or own.shape != ours.shape:
                return math.inf, allowed
            error = float((own.double() - ours.double()).norm() / own.double().norm())
            if not error <= allowed:
                return error, allowed
    return error, allowed


def _half_of_mixed(module: nn.Module) -> torch.dtype | None:
    """The half format of a module with weights of several formats; float8 weights compute in bf16."""
    formats = {parameter.dtype for parameter in module.parameters()}
    formats |= {torch.bfloat16 for buffer in module.buffers() if buffer.dtype == torch.float8_e4m3fn}
    half = next((one for one in (torch.bfloat16, torch.float16) if one in formats), None)
    return half if len(formats) > 1 else None


@contextmanager
def _own_dropout_only(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the module trains, so that a layer with dropout of its own differs; adapters, whose is known, do not."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.eval()
    others = [device] if device.type in ("cuda", "xpu") else []
    try:
        with torch.random.fork_rng(others, device_type=others[0].type if others else "cuda"):
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


__all__ = ["FusedLayers", "fuse"]
