"""torch's optimizers, with and without weight decay by parameter group.

AdamW's moments have a dtype of their own: fp32 for bf16 weights, or bf16 for fp32 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.precision import PrecisionPlan
from halftune.precision.dtypes import torch_dtype

Groups = list[dict[str, Any]]
"""torch's parameter groups: ``params`` and their options."""


def by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> Groups:
    """Split parameters into two groups: matrices have weight decay; biases, norms and other vectors have none."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class AdamWWithStateDtype(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101): arithmetic in fp32, moments kept in ``state_dtype``.

    torch's own AdamW always keeps its moments in the dtype of the weights.
    """

    def __init__(
        self, params: Iterable, lr: float, betas: tuple[float, float], eps: float, *, state_dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=self.state_dtype)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        gradient = weight.grad.float()  # type: ignore[union-attr]
        first = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        value = weight.float() * (1 - group["lr"] * group["weight_decay"])
        value.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))
        weight.copy_(value)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict; moments stay in ``state_dtype`` (torch would cast them to the weights' dtype)."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        indices = (index for group in state_dict["param_groups"] for index in group["params"])
        weights = (weight for group in self.param_groups for weight in group["params"])
        for index, weight in zip(indices, weights, strict=True):
            for name, value in saved.get(index, {}).items():
                if name != "step":
                    self.state[weight][name] = value.to(device=weight.device, dtype=self.state_dtype)


def adamw(model: nn.Module, training: TrainingSection, precision: PrecisionPlan) -> Optimizer:
    """Build AdamW: our implementation if the moments' dtype differs from the weights', else torch's."""
    groups, state = groups_of(model, training), precision.optimizer_state.value
    assert state not in ("8bit", "4bit"), "formats of other optimizers"
    if state != precision.trainable.value:
        return AdamWWithStateDtype(groups, **adam_options(training), state_dtype=torch_dtype(state))
    return torch.optim.AdamW(groups, **adam_options(training), fused=is_fused(groups))


def adam(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adam."""
    groups = groups_of(model, training)
    return torch.optim.Adam(groups, **adam_options(training), fused=is_fused(groups))


def sgd(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build SGD without momentum."""
    return torch.optim.SGD(groups_of(model, training), lr=training.learning_rate)


def adafactor(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adafactor."""
    return torch.optim.Adafactor(groups_of(model, training), lr=training.learning_rate)


def adagrad(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adagrad."""
    return torch.optim.Adagrad(groups_of(model, training), lr=training.learning_rate)


def groups_of(model: nn.Module, training: TrainingSection) -> Groups:
    """Return the parameter groups of all trained weights, with and without weight decay."""
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
