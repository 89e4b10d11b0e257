"""How many processes a run that is started here has."""

from __future__ import annotations

from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.core.launcher import this_process
from halftune.hardware.facts import Hardware
from halftune.launch.command import processes


def world_size(config: RunConfig, hardware: Hardware) -> int:
    """Processes of a run started here: as many as a launcher has started, else as `halftune train` starts it.

    Raises:
        PlanError: the launcher's variables are not valid, or it has started another number than the recipe asks for.
    """
    process = this_process()
    if not process.launched:
        return processes(config, hardware)
    started = process.world_size
    asked = config.distributed.num_processes
    if asked is not None and asked != started:
        what = f"{asked} processes are asked for, and the launcher has started {started}"
        raise PlanError(what, where="distributed.num_processes", remedy="remove it, or start as many")
    return started
