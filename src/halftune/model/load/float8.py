"""Frozen weights under LoRA adapters in float8: rounded once, after loading; the checkpoint is not changed."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from halftune.core.log import get_logger
from halftune.plan import Plan
from halftune_kernels.ops.float8_linear import Float8Weight, fits, float8_linear, quantised

log = get_logger(__name__)


class Float8Linear(nn.Module):
    """A linear layer with a frozen float8 weight; buffers, which are not saved, hold it.

    Args:
        layer: whose weight is rounded; its bias is kept.
        device: where it is rounded and stays; None for where it is.
    """

    def __init__(self, layer: nn.Linear, device: torch.device | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        values, scales = quantised(layer.weight.to(device))
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = layer.bias

    @property
    def float8(self) -> Float8Weight:
        """The weight."""
        return Float8Weight(self.values, self.scales)  # type: ignore[arg-type]

    @property
    def weight(self) -> torch.Tensor:
        """The weight in bf16, for code that looks at it; a copy."""
        return self.float8.make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x Wᵀ + bias`` in autocast's dtype."""
        kind = x.device.type
        inside = kind != "meta" and torch.is_autocast_enabled(kind)
        x = x.to(torch.get_autocast_dtype(kind)) if inside else x
        return float8_linear(x, self.float8, None if self.bias is None else self.bias.detach().to(x.dtype))


def round_to_float8(model: nn.Module, plan: Plan, device: torch.device | None = None) -> int:
    """Round the frozen weights of layers with a LoRA adapter, where the plan says so; returns their number.

    Layers whose sizes are not multiples of 16 keep their weights, and the log says so. A CPU takes longer to round a
    model of 7 B weights than to read it, so each weight is rounded on ``device``.
    """
    if plan.precision.linear is None:
        return 0
    layers: list[Any] = [module for module in model.modules() if type(module) is LoraLinear]
    plain = [layer for layer in layers if type(layer.base_layer) is nn.Linear]
    chosen = [layer for layer in plain if fits(layer.base_layer.weight.shape)]
    for layer in chosen:
        layer.base_layer = Float8Linear(layer.base_layer, device)
    names = [name for name, _ in model.named_buffers() if name.endswith(("base_layer.values", "base_layer.scales"))]
    ignored: Any = model  # DDP would send the weights, which all processes have read, and NCCL may know no float8
    ignored._ddp_params_and_buffers_to_ignore = names
    log.info("%d frozen linear layers in float8, %d keep their format", len(chosen), len(layers) - len(chosen))
    return len(chosen)
