"""Learning-rate schedules, by their names in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from halftune.config.optimizers import SCHEDULES
from halftune.config.sections.training import TrainingSection
from halftune.core.errors import ConfigError

# lr_scheduler_type → (options, peak learning rate, steps of warm-up, all steps) → arguments of transformers' function
_ARGUMENTS: dict[str, Callable[[dict[str, Any], float, int, int], dict[str, Any]]] = {
    "cosine_with_min_lr": lambda of, *_: {"min_lr_rate": of["lr_min_ratio"]},
    "polynomial": lambda of, peak, *_: {"lr_end": of["lr_min_ratio"] * peak, "power": of["lr_power"]},
    "cosine_with_restarts": lambda of, *_: {"num_cycles": of["lr_cycles"]},
    "warmup_stable_decay": lambda of, _, warmup, total: {
        "min_lr_ratio": of["lr_min_ratio"],
        "num_decay_steps": min(math.ceil(of["lr_decay_ratio"] * total), total - warmup),
    },
}


def warmup_steps(training: TrainingSection, total_steps: int) -> int:
    """Steps in which the learning rate rises: ``warmup_steps``, else ``warmup_ratio`` of all, rounded up.

    The first of them trains nothing, so a ratio leaves at least the last step at the peak.
    """
    if training.warmup_steps is not None:
        return training.warmup_steps
    return min(math.ceil(training.warmup_ratio * total_steps), max(0, total_steps - 1))


def check_steps(training: TrainingSection, total_steps: int) -> int:
    """The steps of the run, which may depend on the data, once warm-up and decay are known to fit into them.

    Raises:
        ConfigError: warm-up, or warm-up and decay, take longer than the run.
    """
    warmup, spec = warmup_steps(training, total_steps), SCHEDULES[training.lr_scheduler_type]
    share = training.lr_decay_ratio or spec.options.get("lr_decay_ratio", 0.0)
    if warmup and (warmup >= total_steps or warmup + math.floor(share * total_steps) > total_steps):
        decay = f" and decay ({share:g} of all)" if share else ""
        what = f"expected a shorter warm-up ({warmup} steps){decay}: the run has {total_steps} steps"
        remedy = "lower training.warmup_steps, or use training.warmup_ratio"
        raise ConfigError(what, where="training.warmup_steps", remedy=remedy, code="config.out_of_range")
    return total_steps


def steps_between(every: float, total_steps: int) -> int:
    """Steps of a period: from 1 on their number, below 1 a share of all, rounded up as transformers does."""
    return int(every) if every >= 1 else math.ceil(total_steps * every)


def ends_part(reached: float, steps: int, times: int) -> bool:
    """Whether a step ends one of ``times`` equal parts of an epoch; the last part ends with the epoch.

    Args:
        reached: the share of the epoch's steps that are done, above 0.
        steps: steps of the epoch.
        times: parts; with more parts than steps, every step ends one.
    """
    position = round(reached * steps)
    return position * times // steps > (position - 1) * times // steps


def make_schedule(training: TrainingSection, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """The schedule over ``total_steps`` optimizer steps; it sets the learning rate of the first step at once."""
    name, warmup = training.lr_scheduler_type, warmup_steps(training, total_steps)
    given = {
        "lr_min_ratio": training.lr_min_ratio,
        "lr_cycles": training.lr_cycles,
        "lr_power": training.lr_power,
        "lr_decay_ratio": training.lr_decay_ratio,
    }
    rows = SCHEDULES[name].options.items()
    options = {key: default if given[key] is None else given[key] for key, default in rows}
    if name == "rex":
        factor = partial(_rex, warmup=warmup, total=total_steps, lowest=options["lr_min_ratio"])
        return LambdaLR(optimizer, factor)
    arguments = _ARGUMENTS[name](options, training.learning_rate, warmup, total_steps) if name in _ARGUMENTS else {}
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=arguments,
    )


def _rex(step: int, *, warmup: int, total: int, lowest: float) -> float:
    """Learning rate over its peak: with z the share of steps left, z / (1/2 + z/2) (REX, arXiv:2107.04197, eq. 1)."""
    if step < warmup:
        return step / warmup
    left = max(0.0, (total - step) / max(1, total - warmup))
    return lowest + (1 - lowest) * left / (0.5 + 0.5 * left)
