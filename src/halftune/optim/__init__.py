"""Builds the optimizers of ``halftune.config.optimizers``."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.core import table
from halftune.precision import PrecisionPlan

# training.optim → build(model, training, precision) -> Optimizer, whose state_dict() holds all of its state
BUILDERS: dict[str, str] = {
    "adamw": "halftune.optim.builtin:adamw",
    "adam": "halftune.optim.builtin:adam",
    "sgd": "halftune.optim.builtin:sgd",
    "adafactor": "halftune.optim.builtin:adafactor",
    "adagrad": "halftune.optim.builtin:adagrad",
    "muon": "halftune.optim.muon:build",
}


def make_optimizer(model: nn.Module, training: TrainingSection, precision: PrecisionPlan) -> Optimizer:
    """Build the configured optimizer, with its moments in ``precision.optimizer_state``."""
    return table.load(BUILDERS, training.optim, kind="optimizer")(model, training, precision)
