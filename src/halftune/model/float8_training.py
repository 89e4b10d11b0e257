"""Linear layers that are trained in float8 by torchao: weights stay parameters, and are rounded for each product.

torchao's recipe ``rowwise`` rounds both factors of the three products (output, gradients of input and weight) to e4m3,
with a scale for each row or column that is not summed over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from halftune.core.log import get_logger
from halftune.model.adapters.all_linear import linear_layers
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32
from halftune_kernels.ops.float8_linear import fits

log = get_logger(__name__)

_NARROW = 16  # the longer side over the shorter one; beyond, reading the longer one costs more than the product


class TrainedFloat8Linear(Float8Linear):
    """torchao's layer, ``[..., I]`` → ``[..., O]``, which also knows the autocast of CPUs and inference mode."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``x Wᵀ + bias`` in autocast's dtype; in inference mode with the weights as they are saved."""
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # torchao's tensors cannot be reshaped there, except in graphs, which must not ask
            return F.linear(input, self.weight, self.bias)
        kind = input.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        return super().forward(input)


def train_in_float8(model: nn.Module, plan: Plan, *, emulate: bool) -> int:
    """Let torchao compute the trained linear layers; returns their number.

    Left as they are: the head, routers, weights that stay fp32, layers whose weights other code reads, sizes that are
    not multiples of 16, and layers with one side over 16 times as long as the other one, as the projections to decays
    and gates of linear attention.

    Args:
        model: trained in full, or in part.
        plan: names the weights that stay fp32.
        emulate: whether products are computed in fp32 from the rounded factors.
    """
    names, routers, refused = linear_layers(model)  # pyright: ignore[reportArgumentType]
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    trained = {name: layer for name, layer in layers.items() if layer.weight.requires_grad}
    chosen = {
        name
        for name, layer in trained.items()
        if type(layer) is nn.Linear
        and name not in routers | refused
        and not stays_fp32(f"{name}.weight", layer.weight, plan.precision.keep_fp32.value)
        and fits(layer.weight.shape)
        and max(layer.weight.shape) <= _NARROW * min(layer.weight.shape)
    }
    # rows of a batch are summed over in the weight's gradient, and need not be a multiple of 16
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=recipe)
    for name in chosen:
        model.get_submodule(name).__class__ = TrainedFloat8Linear
    log.info("%d trained linear layers in float8, %d keep their format", len(chosen), len(trained) - len(chosen))
    return len(chosen)
