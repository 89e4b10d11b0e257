"""AdamW with a separate dtype for the moments: fp32 moments for bf16 weights, or bf16 moments for fp32 weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


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
