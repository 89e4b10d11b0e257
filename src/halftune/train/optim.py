"""Optimizers by name, their parameter groups, and moments in the planned dtype."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.precision.dtypes import torch_dtype
from halftune.precision.plan import PrecisionPlan
from halftune.train.adamw_states import AdamWWithStateDtype


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: matrices decay; biases, norms and other vectors do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, training: TrainingSection, precision: PrecisionPlan) -> Optimizer:
    """The optimizer that the configuration names, its moments in ``precision.optimizer_state``."""
    groups = parameter_groups(model, training.weight_decay)
    rate, betas, epsilon = training.learning_rate, (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    state, trainable = precision.optimizer_state.value, precision.trainable.value
    match training.optim:
        case "adamw" if state != trainable:
            return AdamWWithStateDtype(groups, rate, betas, epsilon, state_dtype=torch_dtype(state))
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=_fused(groups))
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, eps=epsilon, fused=_fused(groups))
        case "sgd":
            return torch.optim.SGD(groups, lr=rate)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate)


def _fused(groups: list[dict]) -> bool | None:
    """One pass over each parameter, where torch has it for the device: a third of its default's time on a CPU, and one
    kernel for many parameters on a GPU. None leaves the choice to torch."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return True if kinds in ({"cpu"}, {"cuda"}) else None
