"""Runs one layer of each kind: equal layers with equal inputs have equal attention calls.

A model of 28 equal layers is traced in two or three of them. Nothing is assumed about a model: a layer is taken for
another only where its modules, their attributes, the formats and shapes of their weights, what it is given and where
that was promoted are the same, and where its code does nothing with its own index but find its place in a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from halftune.precision.dtypes import plain_name
from halftune.precision.record.recorder import set_record, step_made_by
from halftune.precision.record.steps import Step, first_promotion
from halftune.precision.trace.findings import starred
from halftune.precision.trace.layer_signature import LayerSignatures, plain_parts
from halftune.precision.trace.tracer import Arrival, Tracer

_FEWEST = 3  # shorter lists of layers are run completely


@dataclass(frozen=True)
class _LayerRun:
    """A layer's run: its attention calls, output and records; ``given`` keeps its inputs alive."""

    name: str
    arrivals: tuple[Arrival, ...]
    output: Any
    made: tuple[tuple[torch.Tensor, Step | None], ...]
    given: tuple[Any, ...]


@dataclass
class LayerReuse:
    """Counts of layers that were run, and that reused another layer's run.

    Attributes:
        replays: runs that were taken from another layer.
        doubtful: whether a layer ran whose earlier run had been left out, so that the state it keeps may be missing.
    """

    tracer: Tracer
    replays: int = 0
    doubtful: bool = False
    _runs: dict[Any, _LayerRun] = field(default_factory=dict)
    _left_out: set[str] = field(default_factory=set)
    _inside: bool = False

    def forward(self, name: str, layer: nn.Module, kind: int) -> Callable[..., Any]:
        """Run ``layer.forward``, or replay the run of an equal layer."""
        own = layer.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return own(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                key = (kind, layer.training, _surroundings(), plain_parts((args, kwargs), _given))
            if key in self._runs:
                return self._replay(self._runs[key], name)
            self.doubtful |= name in self._left_out
            begun, self._inside = len(self.tracer.arrivals), True
            try:
                output = own(*args, **kwargs)
            finally:
                self._inside = False
            made = tuple((tensor, step_made_by(tensor)) for tensor in _tensors(output))
            arrivals = tuple(self.tracer.arrivals[begun:])
            self._runs[key] = _LayerRun(name, arrivals, output, made, (args, kwargs))
            return output

        return forward

    def _replay(self, run: _LayerRun, name: str) -> Any:
        self.replays += 1
        self._left_out.add(name)
        self.tracer.arrivals += [_moved(arrival, run.name, name) for arrival in run.arrivals]
        for tensor, step in run.made:  # later in-place operations may have changed the record
            set_record(tensor, step)
        return run.output


@contextmanager
def reuse_equal_layers(model: nn.Module, tracer: Tracer) -> Iterator[LayerReuse]:
    """Inside, equal layers of ``model`` run once for equal inputs; their attention calls count for each layer."""
    repeats, signatures = LayerReuse(tracer), LayerSignatures()
    before: list[tuple[nn.Module, Any]] = []
    for name, layer, index in _listed(model):
        before.append((layer, vars(layer).get("forward")))
        vars(layer)["forward"] = repeats.forward(name, layer, signatures.kind(layer, index))
    try:
        yield repeats
    finally:
        for layer, forward in before:
            vars(layer).pop("forward")
            if forward is not None:
                vars(layer)["forward"] = forward


def _listed(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module, int]]:
    """Yield the members of the outermost module lists: path, module, index."""
    found: list[tuple[str, nn.Module, int]] = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= _FEWEST:
            found += [(f"{path}.{index}", member, index) for index, member in enumerate(child)]
        else:
            found += _listed(child, f"{path}.")
    once = {id(layer): (name, layer, index) for name, layer, index in reversed(found)}
    return list(reversed(once.values()))


def _surroundings() -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), autocast


def _given(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The key of an input tensor: its identity if it has data, else its format and record."""
    if not isinstance(tensor, FakeTensor):
        return id(tensor), tensor._version
    step = step_made_by(tensor)
    come: tuple[Any, ...] = ()
    if step is not None:
        first = first_promotion(step)
        come = (step.constant, first.op, first.place, starred(first.module), first.promotes, first.carries)
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, come)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    plain_parts(value, lambda tensor: (found.append(tensor),))
    return found


def _moved(arrival: Arrival, old: str, new: str) -> Arrival:
    """Convert an attention call of one layer to that of another."""
    inside = arrival.site == old or arrival.site.startswith(f"{old}.")
    site = f"{new}{arrival.site.removeprefix(old)}" if inside else arrival.site
    mine, yours = f" {plain_name(old)}.", f" {plain_name(new)}."
    operands = tuple(replace(operand, leaf=operand.leaf.replace(mine, yours)) for operand in arrival.operands)
    return replace(arrival, site=site, operands=operands)
