"""StableAdamW (arXiv:2304.13013) of optimi: AdamW whose updates are clipped as Adafactor's are."""

from __future__ import annotations

from typing import Any

import torch
from optimi import StableAdamW
from torch import Tensor, nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import adam_options, groups_of
from halftune.precision import PrecisionPlan

_STEP = "step"


class Stable(StableAdamW):
    """The step count is in the state of the weights; optimi has it in the groups, which checkpoints do not hold."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's format."""
        whole = super().state_dict()
        groups = [{name: value for name, value in group.items() if name != _STEP} for group in whole["param_groups"]]
        steps = {
            index: int(own[_STEP])
            for own, group in zip(self.param_groups, groups, strict=True)
            for index in group["params"]
            if _STEP in own
        }
        state = {
            index: {**entry, "steps": steps[index]} if index in steps else entry
            for index, entry in whole["state"].items()
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            counts = {self.state[weight].pop("steps") for weight in group["params"] if "steps" in self.state[weight]}
            if counts:
                group[_STEP], group["setup"] = torch.tensor(max(counts), dtype=torch.int32), True

    def state_shape(self, weight: Tensor, name: str) -> torch.Size:
        """Shape of a tensor in the state of a weight."""
        if name == "eps_sq":
            return torch.Size()
        # of its Triton kernels: one number each (StableAdamW._init_state)
        return torch.Size([1]) if name in ("mean_square", "kahan_comp") else weight.shape


def stable_adamw(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build StableAdamW, without a second copy of the weights' low bits (Kahan)."""
    on_gpu = next(model.parameters()).is_cuda
    options = {**adam_options(training), "kahan_sum": False, "foreach": False, "triton": on_gpu}
    return Stable(groups_of(model, training), **options)
