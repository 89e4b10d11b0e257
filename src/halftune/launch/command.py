"""The command that starts every process of a run on one machine: torchrun's, with an end that can be read."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from halftune.config.run import RunConfig
from halftune.config.sections.distributed import DistributedSection
from halftune.core import alive
from halftune.core.errors import PlanError
from halftune.hardware.facts import Hardware
from halftune.launch.machines import Machine

RUNNER = "halftune.launch.elastic"


def processes(config: RunConfig, hardware: Hardware) -> int:
    """Processes of a run over all machines: as asked, else one per device; one per machine on a CPU or a Mac.

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
            f"{each} processes need {each} devices, and this machine has {devices}",
            where="distributed.num_processes",
            remedy=f"at most {devices * asked.num_machines}",
        )
    return asked.num_processes


def command(
    distributed: DistributedSection, world_size: int, arguments: Sequence[str], checkpoint: int = 0
) -> list[str]:
    """The command for one machine, as an argument list.

    Args:
        distributed: the section.
        world_size: processes over all machines.
        arguments: of ``halftune``: ``["train", "--config", …]``.
        checkpoint: bytes that are written after a signal.
    """
    each = world_size // distributed.num_machines
    words = ["--nnodes", str(distributed.num_machines), "--nproc-per-node", str(each)]
    if distributed.num_machines == 1:
        words += ["--master-addr", "127.0.0.1", "--master-port", str(distributed.main_process_port)]
    elif not distributed.main_process_ip:
        what = f"{distributed.num_machines} machines must know where to meet"
        remedy = "the address of machine 0, as the others reach it"
        raise PlanError(what, where="distributed.main_process_ip", remedy=remedy)
    else:
        words += ["--node-rank", str(distributed.machine_rank), "--rdzv-backend", "c10d", "--rdzv-id", "halftune"]
        words += ["--rdzv-endpoint", f"{distributed.main_process_ip}:{distributed.main_process_port}"]
        words += ["--rdzv-conf", f"join_timeout={math.ceil(distributed.timeout_seconds)}"]
    words += ["--max-restarts", str(distributed.max_restarts)]
    # after a signal: the step is finished and saved
    words += ["--shutdown-timeout", str(math.ceil(distributed.timeout_seconds + checkpoint / alive.SLOWEST))]
    return [sys.executable, "-m", RUNNER, *words, "-m", "halftune", *arguments]


def machine_of(distributed: DistributedSection, world_size: int) -> Machine | None:
    """This machine among several; None where there is only one."""
    host = distributed.main_process_ip
    if distributed.num_machines == 1 or not host:
        return None
    each, seconds = world_size // distributed.num_machines, distributed.timeout_seconds
    return Machine(
        distributed.machine_rank, distributed.num_machines, each, host, distributed.main_process_port, seconds
    )
