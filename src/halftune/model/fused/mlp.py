"""Gated feed-forward layers, ``down(silu(gate(x)) · up(x))``, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halftune.model.fused.linear import adapted_weight, fits
from halftune_kernels.lora_linear import AdaptedWeight
from halftune_kernels.lora_mlp import lora_mlp

Weights = tuple[AdaptedWeight, AdaptedWeight, AdaptedWeight]
Reader = Callable[[], Weights | None]


def readers(module: nn.Module) -> Iterator[Reader]:
    """Ways to read gate, up and down of a module, which one is right only a comparison tells; none for most modules.

    Three linear children, two of them with the same sizes, or two of which the first makes gate and up at once.
    """
    linear = [child for child in module.children() if hasattr(child, "in_features") and hasattr(child, "out_features")]
    sizes: list[tuple[int, int]] = [(child.in_features, child.out_features) for child in linear]  # type: ignore[misc]
    if len(linear) == 3:
        for down in range(3):
            one, other = (index for index in range(3) if index != down)
            if sizes[one] == sizes[other] == sizes[down][::-1]:
                for order in ((one, other, down), (other, one, down)):
                    yield _of_three([linear[index] for index in order])
    elif len(linear) == 2:
        for first, second in ((0, 1), (1, 0)):
            if sizes[first] == (sizes[second][1], 2 * sizes[second][0]):
                yield _of_two(linear[first], linear[second])


def forward(own: Callable[..., Any], read: Reader) -> Callable[..., Any]:
    """A forward by the operator, or by the layer's own code where something is unusual at the moment."""

    def fused(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.compiler.is_compiling():
            return own(x, *args, **kwargs)
        weights = read()
        dtype = None if weights is None else fits(x, weights)
        if weights is None or dtype is None:
            return own(x)
        with torch.autocast(x.device.type, enabled=False):
            return lora_mlp(x.to(dtype), *weights)

    return fused


def _of_three(layers: list[nn.Module]) -> Reader:
    def read() -> Weights | None:
        gate, up, down = (adapted_weight(layer) for layer in layers)
        return None if gate is None or up is None or down is None else (gate, up, down)

    return read


def _of_two(both: nn.Module, last: nn.Module) -> Reader:
    def read() -> Weights | None:
        joined, down = adapted_weight(both), adapted_weight(last)
        if joined is None or down is None:
            return None
        half = joined.weight.shape[0] // 2
        gate, up = (_rows(joined, slice(0, half)), _rows(joined, slice(half, None)))
        return gate, up, down

    return read


def _rows(layer: AdaptedWeight, cut: slice) -> AdaptedWeight:
    bias = None if layer.bias is None else layer.bias[cut]
    return layer._replace(weight=layer.weight[cut], bias=bias, b=None if layer.b is None else layer.b[cut])
