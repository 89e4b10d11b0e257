"""Fused gated feed-forward layers, ``down(silu(gate(x)) · up(x))``, recognised by their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import nn

from halftune.model.fused.linear import adapted_weight, common_dtype
from halftune_kernels.ops.lora_linear import AdaptedWeight
from halftune_kernels.ops.lora_mlp import lora_mlp

Weights = tuple[AdaptedWeight, AdaptedWeight, AdaptedWeight]


class FusedMlp:
    """The replacement of a layer's forward: the operator, or the layer's own code if unsupported.

    Args:
        module: the layer.
        names: of its children gate, up and down, or of gate_up and down. Children are looked up at every call, since
            adapters replace them.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module, self.names = module, tuple(names)

    def read(self) -> Weights | None:
        """Gate, up and down in their current state; None if one is unsupported."""
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
        dtype = None if weights is None else common_dtype(x, weights)
        if weights is None or dtype is None:
            return type(module).forward(module, x)
        with torch.autocast(x.device.type, enabled=False):
            return lora_mlp(x.to(dtype), *weights)


def candidates(module: nn.Module) -> Iterator[FusedMlp]:
    """Candidate assignments of gate, up and down of a module, to be verified by comparison; none for most modules.

    Three linear children, two of them with equal sizes, or two, the first of which computes gate and up.
    """
    sizes: dict[str, tuple[int, int]] = {
        name: (child.in_features, child.out_features)  # type: ignore[misc]
        for name, child in module.named_children()
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    }
    for order in permutations(sizes) if len(sizes) in (2, 3) else ():
        if _fits([sizes[name] for name in order]):
            yield FusedMlp(module, order)


def _fits(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether (inputs, outputs) of layers are those of gate, up and down, or of gate and up in one layer and down."""
    if len(sizes) == 3:
        return sizes[0] == sizes[1] == sizes[2][::-1]
    return sizes[0] == (sizes[1][1], 2 * sizes[1][0])


def _rows(layer: AdaptedWeight, cut: slice) -> AdaptedWeight:
    bias = None if layer.bias is None else layer.bias[cut]
    return layer._replace(weight=layer.weight[cut], bias=bias, b=None if layer.b is None else layer.b[cut])
