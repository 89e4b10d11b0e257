"""Reads a model that processes share: each the rows that it holds, weight by weight, and no process the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from halftune.core.processes import heartbeat
from halftune.model.load.lazy_weights import CPU, LazyWeights
from halftune.train.parallel.shards import own_rows


def show(model: nn.Module, layers: Sequence[nn.Module], lazy: LazyWeights) -> None:
    """Reads the vectors of a model (norms) whole, and the matrices of one layer of each kind.

    Args:
        model: whose weights are not read.
        layers: those that are sharded one by one.
        lazy: where they are.
    """
    kinds: dict[object, nn.Module] = {}
    for layer in layers:
        sizes = tuple((name, tuple(one.shape), one.dtype) for name, one in layer.named_parameters())
        kinds.setdefault((type(layer), sizes), layer)
    shown = {id(one) for layer in kinds.values() for one in layer.parameters()}
    with lazy.opened():
        _give(
            model,
            {
                id(one): lazy.read(name, torch.empty_like(one, device=CPU))
                for name, one in _named(model, lazy)
                if one.ndim < 2 or (one.ndim == 2 and id(one) in shown)
            },
        )


def fill(model: nn.Module, lazy: LazyWeights, device: torch.device) -> None:
    """Reads what this process holds of every weight that has no numbers yet.

    Args:
        model: after ``fully_shard``.
        lazy: where the weights are.
        device: of the shards.

    Raises:
        ModelError: the files cannot be read any more.
    """
    with lazy.opened(), torch.no_grad():
        for name, weight in _named(model, lazy):
            assert isinstance(weight, DTensor), "fully_shard has sharded every weight"
            heartbeat.beat(weight.nbytes)
            share: Any = torch.empty_like(weight, device=device)
            first, _ = own_rows(weight) or (None, 0)
            lazy.read(name, share.to_local(), first)
            _give(model, {id(weight): share})


def _named(model: nn.Module, lazy: LazyWeights) -> list[tuple[str, nn.Parameter]]:
    """Weights without numbers, each once, under a name that the files know (a head may be the embedding)."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and lazy.knows(name):
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def _give(model: nn.Module, numbers: dict[int, torch.Tensor]) -> None:
    """Puts new parameters in the place of others, wherever those are: by their ids."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is not None and id(old) in numbers:
                new = made.setdefault(id(old), nn.Parameter(numbers[id(old)], requires_grad=old.requires_grad))
                vars(new).update(vars(old))
                module._parameters[leaf] = new
