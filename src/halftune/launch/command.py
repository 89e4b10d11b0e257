"""The command that starts a run's processes on one machine: torchrun, with a readable summary of failures."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halftune.config.run import RunConfig
from halftune.config.sections.training import DistributedSection
from halftune.core.errors import PlanError
from halftune.core.processes import heartbeat
from halftune.core.processes.process import this_process
from halftune.hardware import Hardware

if TYPE_CHECKING:
    from halftune.launch.machines import Machine

RUNNER = "halftune.launch.elastic"


def processes(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of processes over all machines: as configured, else one per device; one per CPU or Mac.

    Raises:
        PlanError: more processes than devices.
    """
    asked = config.distributed
    alone = hardware.kind in ("cpu", "mps")
    devices = 1 if alone else len(hardware.devices)
    if asked.num_processes is None:
        return devices * asked.num_machines
    each = asked.num_processes // asked.num_machines
    if hardware.kind != "cpu" and each > devices:
        raise PlanError(
            f"{each} processes require {each} devices; this machine has {devices}",
            where="distributed.num_processes",
            remedy=f"use at most {devices * asked.num_machines}",
            code="launch.too_many_processes",
        )
    return asked.num_processes


def world_size(config: RunConfig, hardware: Hardware) -> int:
    """Return the world size: that of the launcher, else the number that `halftune train` starts.

    Raises:
        PlanError: the launcher's variables are invalid, or it started another number than configured.
    """
    process = this_process()
    if not process.launched:
        return processes(config, hardware)
    started = process.world_size
    asked = config.distributed.num_processes
    if asked is not None and asked != started:
        what = f"num_processes is {asked}, but the launcher started {started}"
        raise PlanError(
            what,
            where="distributed.num_processes",
            remedy=f"remove it, or start {asked} processes",
            code="launch.process_count_differs",
        )
    return started


def command(
    distributed: DistributedSection,
    world_size: int,
    arguments: Sequence[str],
    checkpoint: int = 0,
    known: tuple[str, str] = ("", ""),
) -> list[str]:
    """Return the command for one machine, as a list of arguments.

    Args:
        distributed: the section.
        world_size: processes over all machines.
        arguments: of ``halftune``: ``["train", "--config", …]``.
        checkpoint: bytes of the checkpoint written after a signal.
        known: shell words for this machine's rank and the address of machine 0; empty: from the config.
    """
    each = world_size // distributed.num_machines
    rank, host = known[0] or str(distributed.machine_rank), known[1] or distributed.main_process_ip
    words = ["--nnodes", str(distributed.num_machines), "--nproc-per-node", str(each)]
    if distributed.num_machines == 1:
        words += ["--master-addr", "127.0.0.1", "--master-port", str(distributed.main_process_port)]
    elif not host:
        what = f"num_machines is {distributed.num_machines}, but the address of machine 0 is not set"
        remedy = "set it to an address of machine 0 that the others can reach"
        raise PlanError(what, where="distributed.main_process_ip", remedy=remedy, code="launch.bad_main_address")
    else:
        words += ["--node-rank", rank, "--rdzv-backend", "c10d", "--rdzv-id", "halftune"]
        words += ["--rdzv-endpoint", f"{host}:{distributed.main_process_port}"]
        words += ["--rdzv-conf", f"join_timeout={math.ceil(distributed.timeout_seconds)}"]
    words += ["--max-restarts", str(distributed.max_restarts)]
    # after a signal, the current step is finished and saved
    words += ["--shutdown-timeout", str(math.ceil(distributed.timeout_seconds + checkpoint / heartbeat.SLOWEST))]
    return [sys.executable, "-m", RUNNER, *words, "-m", "halftune", *arguments]


def machine_of(distributed: DistributedSection, world_size: int) -> Machine | None:
    """Return this machine's description; None for a single machine."""
    host = distributed.main_process_ip
    if distributed.num_machines == 1 or not host:
        return None
    from halftune.launch.machines import Machine  # few runs use several machines

    each, seconds = world_size // distributed.num_machines, distributed.timeout_seconds
    return Machine(
        distributed.machine_rank, distributed.num_machines, each, host, distributed.main_process_port, seconds
    )
