"""Builds torch's optimizers from the configuration and the plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.optim.adamw_states import AdamWWithStateDtype
from halftune.optim.groups import Groups, by_decay
from halftune.precision.dtypes import torch_dtype
from halftune.precision.plan import PrecisionPlan


def adamw(model: nn.Module, training: TrainingSection, precision: PrecisionPlan) -> Optimizer:
    """Build AdamW: our implementation if the moments' dtype differs from the weights', else torch's."""
    groups, state = _groups(model, training), precision.optimizer_state.value
    if state != precision.trainable.value:
        return AdamWWithStateDtype(groups, **adam_options(training), state_dtype=torch_dtype(state))
    return torch.optim.AdamW(groups, **adam_options(training), fused=is_fused(groups))


def adam(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adam."""
    groups = _groups(model, training)
    return torch.optim.Adam(groups, **adam_options(training), fused=is_fused(groups))


def sgd(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build SGD without momentum."""
    return torch.optim.SGD(_groups(model, training), lr=training.learning_rate)


def adafactor(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adafactor."""
    return torch.optim.Adafactor(_groups(model, training), lr=training.learning_rate)


def adagrad(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adagrad."""
    return torch.optim.Adagrad(_groups(model, training), lr=training.learning_rate)


def _groups(model: nn.Module, training: TrainingSection) -> Groups:
    return by_decay([one for one in model.parameters() if one.requires_grad], training.weight_decay)


def adam_options(training: TrainingSection) -> dict[str, Any]:
    """Return learning rate, betas and epsilon by torch's names."""
    betas = (training.adam_beta1, training.adam_beta2)
    return {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon}


def is_fused(groups: Groups) -> bool | None:
    """Return True if torch has a fused implementation for the device (three times as fast on a CPU), else None: torch's
    default."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return True if kinds in ({"cpu"}, {"cuda"}) else None
