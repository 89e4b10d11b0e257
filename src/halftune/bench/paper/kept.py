"""Predicted speeds in the cache: written by ``bench --paper``, read by ``plan``, which has no seconds for its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halftune import __version__
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError
from halftune.core.files import cache_dir, read_json
from halftune.core.log import get_logger
from halftune.core.optional import version_of
from halftune.hardware import Device
from halftune.hardware.roofline import HOST_CALL, HOST_LAUNCH, HOST_SYNC, SCANS, roofline_of
from halftune.plan import Plan, to_dict
from halftune.plan.duration import Pace

log = get_logger(__name__)

# Length, places and seeds of a run, which do not change its speed.
_LENGTH: Any = {
    "training": {"max_steps", "num_train_epochs", "output_dir", "resume", "seed"},
    "data": {"train", "eval"},
    "logging": True,
}
_OF_MACHINE = {"machine", "memory", "warnings", "rejected", "rejected_linear"}  # says how a machine is described
_PACKAGES = ("torch", "transformers", "peft")  # whose code the step runs
_SPEEDS = (1e-3, 1e9)  # tokens/s of any GPU


def keep(
    config: RunConfig, plan: Plan, facts: ModelFacts, device: Device, *, tokens_per_second: float, peak: int
) -> None:
    """Keep a prediction, with the step's peak in bytes; a cache that cannot be written is a warning."""
    if facts.counted_in == "own code":  # which may change beside config.json
        return
    try:
        path = _path(config, plan, facts, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"tokens_per_second": tokens_per_second, "peak_bytes": peak}))
    except (OSError, ConfigError) as error:
        log.warning("predicted speed not kept: %s", error)


def known(config: RunConfig, plan: Plan, facts: ModelFacts, device: Device) -> Pace | None:
    """The predicted pace of a run on a device, or None; None, too, if the step does not fit into its memory.

    Args:
        config, plan, facts: of the run.
        device: of this machine or of a described one.
    """
    try:
        kept = read_json(_path(config, plan, facts, device))
        speed, peak = kept["tokens_per_second"], kept["peak_bytes"]
    except (OSError, ConfigError, ValueError, TypeError, KeyError):
        return None
    least, most = _SPEEDS  # anyone may have written the file
    if not (_is_number(speed) and least <= speed <= most and _is_number(peak) and 0 < peak <= device.memory_bytes):
        return None
    return Pace(float(speed), plan.batch.tokens_per_step, None)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # a boolean is none


def _path(config: RunConfig, plan: Plan, facts: ModelFacts, device: Device) -> Path:
    """The file of everything that the step and its time follow from.

    A GPU is known by its rates, since drivers and descriptions of machines have other names for it; decisions count
    without their reasons, which name the machine.
    """
    roofline = roofline_of(device.name)
    rates = [roofline and asdict(roofline), HOST_LAUNCH, HOST_CALL, HOST_SYNC, SCANS]
    versions = [__version__, *map(version_of, _PACKAGES)]
    asked = config.model_dump(mode="json", exclude=_LENGTH)
    text = json.dumps([versions, rates, asked, facts.raw, _decided(to_dict(plan))], sort_keys=True, default=str)
    return cache_dir() / "predicted" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _decided(part: Any) -> Any:
    """A plan's values without reasons and what is said of the machine."""
    if isinstance(part, list):
        return [_decided(one) for one in part]
    if not isinstance(part, dict):
        return part
    if part.keys() == {"value", "reason"}:
        return _decided(part["value"])
    return {name: _decided(value) for name, value in part.items() if name not in _OF_MACHINE}
