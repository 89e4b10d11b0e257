"""Schedule-Free AdamW (arXiv:2405.15682), by its authors' package.

Gradients are taken at one point, and the result is another: a running average. The optimizer puts the average into the
model for evaluations, samples, checkpoints and the result (``eval``), and the point back for training (``train``).
"""

from __future__ import annotations

from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import adam_options, groups_of
from halftune.precision import PrecisionPlan

_COUNTS = ("k", "weight_sum", "lr_max", "train_mode")  # of a group; checkpoints hold no options of groups
_POINT = "y"


class ScheduleFree(AdamWScheduleFree):
    """Going to the average and back changes no bit: the point is kept meanwhile, as a part of the state."""

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the weights."""
        for group in self.param_groups:
            for weight in group["params"] if group["train_mode"] else ():
                if "z" in self.state[weight]:
                    self.state[weight][_POINT] = weight.clone()
        super().eval()

    @torch.no_grad()
    def train(self) -> None:
        """Put the point into the weights at which gradients are taken."""
        for group in self.param_groups:
            for weight in () if group["train_mode"] else group["params"]:
                if _POINT in self.state[weight]:
                    weight.copy_(self.state[weight].pop(_POINT))
            group["train_mode"] = True  # not by super().train(), which computes the point anew and rounds it

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's format, with the counts of its group in the state of each weight."""
        whole = super().state_dict()
        state = dict(whole["state"])
        for group in whole["param_groups"]:
            for index in group["params"]:
                if index in state:
                    state[index] = {**state[index], **{name: group[name] for name in _COUNTS}}
        return {**whole, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for entry in (self.state[weight] for weight in group["params"]):
                group.update({name: entry.pop(name) for name in _COUNTS if name in entry})


def adamw(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Schedule-Free AdamW; the warm-up is that of the schedule."""
    optimizer = ScheduleFree(groups_of(model, training), **adam_options(training))
    optimizer.train()
    return optimizer


def show_average(optimizer: Optimizer, *, shown: bool) -> None:
    """Put the average into the weights, or the point of training; nothing with other optimizers."""
    if isinstance(optimizer, ScheduleFree):
        optimizer.eval() if shown else optimizer.train()
