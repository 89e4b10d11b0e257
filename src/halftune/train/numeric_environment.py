"""What the last bit of a run depends on beside its configuration: versions, device, format, threads."""

from __future__ import annotations

import platform
from typing import Any

import torch

from halftune import __version__
from halftune.core.log import get_logger
from halftune.core.optional import version_of
from halftune.train.state import TrainState

log = get_logger(__name__)
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "numpy")


def numeric_environment(run: TrainState) -> dict[str, str]:
    """Name → value, of this sitting; a checkpoint holds it."""
    versions = {name: version_of(name) or "none" for name in PACKAGES}
    found = {"halftune": __version__, "python": platform.python_version(), **versions}
    found |= {"device": run.device.type, "compute": run.plan.precision.compute.value}
    attention = run.plan.attention
    found["attention"] = f"{attention.softmax.value} ({attention.provider.value})"
    found["linear attention"] = attention.linear.value
    found |= {"processes": str(run.plan.batch.world_size), "strategy": run.plan.distribution.value}
    if run.device.type == "cpu":  # how a sum is split decides its rounding
        found |= {"threads": str(torch.get_num_threads()), "vectors": torch.backends.cpu.get_cpu_capability()}
    elif run.device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(run.device)}
    return found


def warn_other_environment(before: dict[str, Any], now: dict[str, str]) -> None:
    """Warns where a run goes on with other versions or another machine than a checkpoint was made with."""
    if not before:
        log.warning("the checkpoint does not record its versions: the result may not be bit-identical")
        return
    names = sorted(before.keys() | now.keys())
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        log.warning(
            "the checkpoint was written with %s, this process has %s: the result may not be bit-identical",
            ", ".join(f"{name} {before.get(name, 'unknown')}" for name in changed),
            ", ".join(f"{name} {now.get(name, 'unknown')}" for name in changed),
        )
