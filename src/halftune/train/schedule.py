"""Learning-rate schedules, by their names in transformers."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from halftune.config.sections.training import TrainingSection

# What a schedule needs beyond its name to do what its name says.
_ARGUMENTS: dict[str, dict[str, float]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"power": 1.0, "lr_end": 0.0},
}


def warmup_steps(training: TrainingSection, total_steps: int) -> int:
    """Steps in which the learning rate rises: ``warmup_steps``, else ``warmup_ratio`` of all, rounded up.

    The first of them trains nothing, so at most half of a very short run is warm-up.
    """
    if training.warmup_steps is not None:
        return training.warmup_steps
    return min(math.ceil(training.warmup_ratio * total_steps), total_steps // 2)


def steps_between(every: float, total_steps: int) -> int:
    """Steps of a period: from 1 on their number, below 1 a share of all, rounded up as transformers does."""
    return int(every) if every >= 1 else math.ceil(total_steps * every)


def make_schedule(training: TrainingSection, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The schedule over ``total_steps`` optimizer steps; it sets the learning rate of the first step at once."""
    return get_scheduler(
        training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=warmup_steps(training, total_steps),
        num_training_steps=total_steps,
        scheduler_specific_kwargs=_ARGUMENTS.get(training.lr_scheduler_type, {}),
    )
