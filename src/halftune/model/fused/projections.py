"""Adapted linear layers: those that read the same input (query, key, value) as one operator, others each as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from halftune.model.fused.linear import adapted_weight, fits
from halftune_kernels.ops.lora_linear import AdaptedWeight, lora_linear

SHARING = ("q_proj", "k_proj", "v_proj")


class Projections:
    """Computes the layers of a group when the first of them is called; the others find their result waiting.

    Results wait only while the parent runs, and only for the very tensor that the first layer was called with: the
    group is a guess about speed, never about values. A layer that is called otherwise computes for itself.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._open = False
        self._waiting: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None

    def watch(self, parent: nn.Module) -> list[RemovableHandle]:
        """Lets results wait while ``parent`` runs, and drops what nobody took, also where it ends in an exception."""
        return [
            parent.register_forward_pre_hook(self._begin),
            parent.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._open = True

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._open, self._waiting = False, None

    def compute(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The result of the layer at ``index``; None where something is unusual."""
        waiting = self._waiting  # read once: another thread may use the same model
        if index and waiting is not None and waiting[0] is x and waiting[1] == x._version:
            output = waiting[2].pop(index, None)
            if output is not None:
                return output
        # Inference tensors count no versions: whether one has changed since could not be told.
        together = index == 0 and self._open and not x.is_inference()
        outputs = _compute(x, self.layers if together else self.layers[index : index + 1])
        if outputs is not None and len(outputs) > 1:
            self._waiting = x, x._version, dict(enumerate(outputs[1:], 1))
        return outputs[0] if outputs else None


class FusedProjection:
    """Stands in for the forward of the layer at ``index`` of a group."""

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
    dtype = fits(x, weights)
    if dtype is None:
        return None
    with torch.autocast(x.device.type, enabled=False):
        return lora_linear(x.to(dtype), weights)
