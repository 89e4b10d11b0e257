"""Linear layers that are trained in float8 by torchao: weights stay parameters, and are rounded for each product.

torchao's recipe ``rowwise`` rounds both factors of the three products (output, gradients of input and weight) to e4m3,
with a scale for each row or column that is not summed over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from halftune.core.log import get_logger
from halftune.model.adapters.all_linear import linear_layers
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32
from halftune_kernels.ops.float8_linear import fits

log = get_logger(__name__)

_NARROW = 16  # the longer side over the shorter one; beyond, reading the longer one costs more than the product


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
    log.info("%d trained linear layers in float8, %d keep their format", len(chosen), len(trained) - len(chosen))
    return len(chosen)
