"""Stands zeros without memory in for weights that are not read, while peft creates adapters beside them."""

from __future__ import annotations

import torch
from torch import nn

from halftune.model.load.lazy_weights import META, LazyWeights


def insert_zero_weights(model: nn.Module) -> dict[int, nn.Parameter]:
    """Replace meta weights by CPU weights that are one expanded zero.

    peft creates adapters on the device of the base weight: on the meta device they would have no values.

    Returns:
        the original weights, by the id of their replacement.
    """
    originals: dict[int, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                if id(weight) not in made:
                    zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                    made[id(weight)] = nn.Parameter(zero, requires_grad=weight.requires_grad)
                    vars(made[id(weight)]).update(vars(weight))
                    originals[id(made[id(weight)])] = weight
                module._parameters[leaf] = made[id(weight)]
    return originals


def remove_zero_weights(model: nn.Module, originals: dict[int, nn.Parameter], lazy: LazyWeights) -> None:
    """Undo :func:`insert_zero_weights` in a model with an adapter, including copies (``modules_to_save``)."""
    for path, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in originals and lazy.knows(f"{path}.{leaf}"):
                originals[id(weight)] = nn.Parameter(weight.detach().to(META), requires_grad=weight.requires_grad)
                vars(originals[id(weight)]).update(vars(weight))
            if id(weight) in originals:
                originals[id(weight)].requires_grad_(weight.requires_grad)
                module._parameters[leaf] = originals[id(weight)]
