"""Zeros that take no memory in the place of weights that are still in their files, while peft makes adapters."""

from __future__ import annotations

import torch
from torch import nn

from halftune.model.unread import META, Unread


def stand_in(model: nn.Module) -> dict[int, nn.Parameter]:
    """Puts weights on the CPU that all show one zero in the place of those without numbers.

    peft makes adapters where the weight is that they are for: beside one without numbers they would have none.

    Returns:
        what was there, by the id of what is there now.
    """
    there: dict[int, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                if id(weight) not in made:
                    zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                    made[id(weight)] = nn.Parameter(zero, requires_grad=weight.requires_grad)
                    vars(made[id(weight)]).update(vars(weight))
                    there[id(made[id(weight)])] = weight
                module._parameters[leaf] = made[id(weight)]
    return there


def take_back(model: nn.Module, there: dict[int, nn.Parameter], unread: Unread) -> None:
    """Undoes :func:`stand_in` in a model that has an adapter now, and in copies (``modules_to_save``) likewise."""
    for path, module in model.named_modules():
        for leaf, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in there and unread.knows(f"{path}.{leaf}"):
                there[id(weight)] = nn.Parameter(weight.detach().to(META), requires_grad=weight.requires_grad)
                vars(there[id(weight)]).update(vars(weight))
            if id(weight) in there:
                there[id(weight)].requires_grad_(weight.requires_grad)
                module._parameters[leaf] = there[id(weight)]
