"""How many processes a run that is started here has."""

from __future__ import annotations

import os

from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.hardware.facts import Hardware
from halftune.launch.command import processes


def world_size(config: RunConfig, hardware: Hardware) -> int:
    """Processes of a run started here: ``WORLD_SIZE`` where a launcher has set it, else as `halftune train` starts it.

    Raises:
        PlanError: the variable holds no count, or another one than the recipe asks for.
    """
    started = os.environ.get("WORLD_SIZE")
    if not started:
        return processes(config, hardware)
    if not started.isdecimal() or int(started) < 1:
        what = f"{started!r} is no number of processes"
        raise PlanError(what, where="WORLD_SIZE", remedy="start the run with torchrun, or unset the variable")
    asked = config.distributed.num_processes
    if asked is not None and asked != int(started):
        what = f"{asked} processes are asked for, and the launcher has started {started}"
        raise PlanError(what, where="distributed.num_processes", remedy="remove it, or start as many")
    return int(started)
