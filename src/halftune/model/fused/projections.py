"""Fused adapted linear layers: those with a common input (query, key, value) together, others alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from halftune.model.fused.linear import adapted_weight, common_dtype
from halftune_kernels.ops.lora_linear import AdaptedWeight, lora_linear

SHARING = ("q_proj", "k_proj", "v_proj")


class Projections:
    """Computes all layers of a group when the first is called, and caches the results for the others.

    Cached results are valid only while the parent runs, and only for the same input tensor. A layer that is called with
    another input computes its own result.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._open = False
        self._waiting: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None

    def watch(self, parent: nn.Module) -> list[RemovableHandle]:
        """Enable caching while ``parent`` runs; unused results are dropped, also after an exception."""
        return [
            parent.register_forward_pre_hook(self._begin),
            parent.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._open = True

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._open, self._waiting = False, None

    def compute(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The result of the layer at ``index``; None if it is unsupported."""
        if index and (output := self._take(index, x)) is not None:
            return output
        # Inference tensors have no version counter: in-place changes would go unnoticed.
        together = index == 0 and self._open and not x.is_inference()
        outputs = _compute(x, self.layers if together else self.layers[index : index + 1])
        if outputs is not None and len(outputs) > 1:
            self._waiting = x, x._version, dict(enumerate(outputs[1:], 1))
        return outputs[0] if outputs else None

    def _take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The cached result of a layer for this very input."""
        waiting = self._waiting  # read once: another thread may use the same model
        if waiting is not None and waiting[0] is x and waiting[1] == x._version:
            return waiting[2].pop(index, None)
        return None


class FusedProjection:
    """The replacement of the forward of the layer at ``index`` of a group."""

    def __init__(self, group: Projections, index: int) -> None:
        self.group, self.index = group, index

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the layer's own forward returns."""
        layer = self.group.layers[self.index]
        usual = not (args or kwargs or torch.compiler.is_compiling())
        output = self.group.compute(self.index, x) if usual else None
        return type(layer).forward(layer, x, *args, **kwargs) if output is None else output


def _compute(x: torch.Tensor, layers: Sequence[nn.Module]) -> tuple[torch.Tensor, ...] | None:
    weights: list[AdaptedWeight] = []
    for layer in layers:
        weight = adapted_weight(layer)
        if weight is None:
            return None
        weights.append(weight)
    dtype = common_dtype(x, weights)
    if dtype is None:
        return None
    with torch.autocast(x.device.type, enabled=False):
        return lora_linear(x.to(dtype), weights)
