"""Adapted linear layers: those that read the same input (query, key, value) as one operator, others each as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from halftune.model.fused.linear import adapted_weight, fits
from halftune_kernels.lora_linear import AdaptedWeight, lora_linear

SHARING = ("q_proj", "k_proj", "v_proj")


class Projections:
    """Computes the layers of a group when the first of them is called; the others find their result waiting.

    A layer that is called with another tensor than the first was computes for itself: the group is a guess about speed,
    never about values.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._input: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def forward_of(self, index: int) -> Any:
        """A forward for the layer at ``index``."""
        layer = self.layers[index]
        own = layer.forward

        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args or kwargs or torch.compiler.is_compiling():
                return own(x, *args, **kwargs)
            if index and x is self._input and index in self._waiting:
                return self._take(index)
            asked = self.layers if index == 0 else (layer,)
            outputs = _compute(x, asked)
            if outputs is None:
                return own(x)
            if index == 0 and len(outputs) > 1:
                self._input, self._waiting = x, dict(enumerate(outputs[1:], 1))
            return outputs[0]  # pyright: ignore[reportGeneralTypeIssues]

        return forward

    def _take(self, index: int) -> torch.Tensor:
        output = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return output


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
