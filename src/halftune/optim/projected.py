"""AdamW in a space of low rank: GaLore (arXiv:2403.03507) and APOLLO (arXiv:2412.05270), by their authors' packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import Groups, adam_options, by_decay, split_hidden
from halftune.precision import PrecisionPlan

_PROJECTOR, _MATRIX, _SEED = "projector", "projection", "projection_seed"


class _Plain(Optimizer):
    """State as tensors and numbers; the packages keep an object, which checkpoints do not hold."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights. New projections are laid out as a checkpoint's: products depend on it in the last bit."""
        found = super().step(closure)
        for entry in self.state.values():
            if (projector := entry.get(_PROJECTOR)) is not None:
                projector.ortho_matrix = projector.ortho_matrix.contiguous()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's format, with a projector as its matrix and its seed."""
        whole = super().state_dict()
        return {**whole, "state": {index: _flat(entry) for index, entry in whole["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for entry in (self.state[weight] for weight in group["params"]):
                if _MATRIX not in entry:
                    continue
                projector = entry[_PROJECTOR] = self._projector(group, entry)
                projector.ortho_matrix = entry.pop(_MATRIX)
                if _SEED in entry:
                    projector.seed = entry.pop(_SEED)

    def state_shape(self, weight: Tensor, name: str) -> torch.Size:
        """Shape of a tensor in the state of a weight."""
        group = next(one for one in self.param_groups if any(weight is other for other in one["params"]))
        if name == "scaled_grad":  # a norm
            return torch.Size()
        if "rank" not in group:
            return weight.shape
        rank = group["rank"] if "proj" in group else min(group["rank"], *weight.shape)  # APOLLO's are random
        (rows, columns), tall = weight.shape, weight.shape[0] >= weight.shape[1]
        if name == _MATRIX:
            return torch.Size((rank, columns) if tall else (rows, rank))
        return torch.Size((rows, rank) if tall else (rank, columns))

    def _projector(self, group: dict[str, Any], entry: dict[str, Any]) -> Any:
        raise NotImplementedError


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in entry.items() if name != _PROJECTOR}
    if (projector := entry.get(_PROJECTOR)) is not None:
        flat[_MATRIX] = projector.ortho_matrix
        if hasattr(projector, "seed"):
            flat[_SEED] = projector.seed
    return flat


def galore(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build GaLore's AdamW."""
    adamw: Any = import_module("galore_torch.adamw").AdamW
    projector = import_module("galore_torch.galore_projector").GaLoreProjector

    class GaLore(_Plain, adamw):
        def _projector(self, group: dict[str, Any], entry: dict[str, Any]) -> Any:
            given = {name: group[name] for name in ("rank", "update_proj_gap", "scale", "proj_type")}
            return projector(**given)

    options: dict[str, Any] = {**adam_options(training), "no_deprecation_warning": True}
    return GaLore(_groups(model, training), **options)


def apollo(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build APOLLO's AdamW, with random projections and a scale for each row or column."""
    adamw: Any = import_module("apollo_torch.apollo").AdamW

    class Apollo(_Plain, adamw):
        def _projector(self, group: dict[str, Any], entry: dict[str, Any]) -> Any:
            return self._initialize_projector(group, entry)

    more = {"proj": "random", "scale_type": "channel"}
    return Apollo(_groups(model, training, **more), **adam_options(training))


def _groups(model: nn.Module, training: TrainingSection, **more: Any) -> Groups:
    """Hidden matrices with their projections, and all other weights."""
    hidden, rest = split_hidden(model)
    projection = {
        "rank": training.projection_rank,
        "update_proj_gap": training.projection_interval,
        "scale": training.projection_scale,
        "proj_type": "std",
        **more,
    }
    vectors = training.weight_decay_on == "all"
    projected = [{**group, **projection} for group in by_decay(hidden, training.weight_decay)]
    return [*projected, *by_decay(rest, training.weight_decay, vectors=vectors)]
