"""Gated feed-forward layers, ``down(silu(gate(x)) · up(x))``, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from halftune.model.fused.linear import adapted_weight, fits
from halftune_kernels.ops.lora_linear import AdaptedWeight
from halftune_kernels.ops.lora_mlp import lora_mlp

Weights = tuple[AdaptedWeight, AdaptedWeight, AdaptedWeight]


class FusedMlp:
    """Stands in for a layer's forward: the operator, or the layer's own code where something is unusual at the moment.

    Args:
        module: the layer.
        names: of its children gate, up and down, or of the one that makes gate and up at once, and down. The children
            are looked up at every call: adapters come and go by replacing them.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module, self.names = module, tuple(names)

    def read(self) -> Weights | None:
        """Gate, up and down as they are now; None where one of them is unusual."""
        layers = [adapted_weight(self.module.get_submodule(name)) for name in self.names]
        if any(layer is None for layer in layers):
            return None
        *first, down = (layer for layer in layers if layer is not None)
        if len(first) == 1:
            half = first[0].weight.shape[0] // 2
            first = [_rows(first[0], cut) for cut in (slice(0, half), slice(half, None))]
        return first[0], first[1], down

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        module = self.module
        if args or kwargs or torch.compiler.is_compiling():
            return type(module).forward(module, x, *args, **kwargs)
        weights = self.read()
        dtype = None if weights is None else fits(x, weights)
        if weights is None or dtype is None:
            return type(module).forward(module, x)
        with torch.autocast(x.device.type, enabled=False):
            return lora_mlp(x.to(dtype), *weights)


def candidates(module: nn.Module) -> Iterator[FusedMlp]:
    """Ways to read gate, up and down of a module, which one is right only a comparison tells; none for most modules.

    Three linear children, two of them with the same sizes, or two of which the first makes gate and up at once.
    """
    sizes: dict[str, tuple[int, int]] = {
        name: (child.in_features, child.out_features)  # type: ignore[misc]
        for name, child in module.named_children()
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    }
    if len(sizes) == 3:
        for down in sizes:
            one, other = (name for name in sizes if name != down)
            if sizes[one] == sizes[other] == sizes[down][::-1]:
                for order in ((one, other, down), (other, one, down)):
                    yield FusedMlp(module, order)
    elif len(sizes) == 2:
        for first, second in (tuple(sizes), tuple(sizes)[::-1]):
            if sizes[first] == (sizes[second][1], 2 * sizes[second][0]):
                yield FusedMlp(module, (first, second))


def _rows(layer: AdaptedWeight, cut: slice) -> AdaptedWeight:
    bias = None if layer.bias is None else layer.bias[cut]
    return layer._replace(weight=layer.weight[cut], bias=bias, b=None if layer.b is None else layer.b[cut])
