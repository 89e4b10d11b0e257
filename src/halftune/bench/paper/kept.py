"""Predicted speeds in the cache: written by ``bench --paper``, read by ``plan``, which has no seconds for its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from halftune import __version__
from halftune.config.run import RunConfig
from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError
from halftune.core.files import cache_dir, read_json
from halftune.core.log import get_logger
from halftune.plan import Plan, to_dict
from halftune.plan.duration import Pace

log = get_logger(__name__)

# Length, places and seeds of a run, which do not change its speed.
_LENGTH: Any = {
    "training": {"max_steps", "num_train_epochs", "output_dir", "resume", "seed"},
    "data": {"train", "eval"},
    "logging": True,
}
_OF_MACHINE = ("memory", "warnings")  # differ with what else uses the machine


def keep(config: RunConfig, plan: Plan, device: str, tokens_per_second: float) -> None:
    """Keep a prediction; a cache that cannot be written is a warning."""
    try:
        path = _path(config, plan, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"tokens_per_second": tokens_per_second}))
    except (OSError, ConfigError) as error:
        log.warning("predicted speed not kept: %s", error)


def known(config: RunConfig, plan: Plan, device: str) -> Pace | None:
    """The predicted pace of a run on a device, or None.

    Args:
        config, plan: of the run.
        device: the driver's name.
    """
    try:
        speed = float(read_json(_path(config, plan, device))["tokens_per_second"])
    except (OSError, ConfigError, ValueError, TypeError, KeyError):
        return None
    return Pace(speed, plan.batch.tokens_per_step, None) if speed > 0 else None


def _path(config: RunConfig, plan: Plan, device: str) -> Path:
    decided = {name: value for name, value in to_dict(plan).items() if name not in _OF_MACHINE}
    asked = config.model_dump(mode="json", exclude=_LENGTH)
    text = json.dumps([__version__, device, asked, decided], sort_keys=True, default=str)
    return cache_dir() / "predicted" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
