"""The ``distributed`` section: processes, machines, and the parallelism strategy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.section import LISTED, Flag, Int, Number, Section


class FsdpSection(Section):
    """Options of `strategy: fsdp2`."""

    wrap: Annotated[tuple[str, ...], LISTED] = ()
    """Class names of the modules to shard as units; by default the decoder layers."""

    reshard_after_forward: Flag = True
    """Free a layer's gathered weights after its forward pass and gather them again for backward: less memory, 1.5 times
    the communication."""

    sync_each_batch: Flag | Literal["auto"] = "auto"
    """Reduce gradients after every micro-batch. Otherwise once per step, with less communication and full gradients on
    each device. `auto`: once per step if the estimate says that they fit."""

    cpu_offload: Flag = False
    """Keep shards, gradients and optimizer state in main memory, and run the optimizer on the CPU."""


class DistributedSection(Section):
    """Several devices and machines. `distributed: fsdp2` is short for `distributed: {strategy: fsdp2}`."""

    word: ClassVar[str | None] = "strategy"

    strategy: Literal["auto", "ddp", "fsdp2", "deepspeed"] = "auto"
    """`ddp`: a full model on each device; `fsdp2`: sharded weights, gradients and optimizer state. `auto`: ddp if the
    estimate says that the full model fits, else fsdp2."""

    num_processes: Annotated[Int, Field(ge=1)] | None = None
    """Processes over all machines, one device each; by default one per visible device, and one on a CPU."""

    num_machines: Annotated[Int, Field(ge=1)] = 1
    """Machines that train together; each starts the same command, with its own `machine_rank`."""

    machine_rank: Annotated[Int, Field(ge=0)] = 0
    """Rank of this machine, from 0."""

    main_process_ip: str | None = None
    """Host name or address of machine 0 for the others."""

    main_process_port: Annotated[Int, Field(ge=1024, le=65534)] = 29500
    """Port of the rendezvous. Several machines also use the next port: open both."""

    max_restarts: Annotated[Int, Field(ge=0)] = 0
    """Number of restarts from the newest valid checkpoint after a process fails."""

    timeout_seconds: Annotated[Number, Field(ge=5)] = 600.0
    """Timeout for a process without a heartbeat, after which the job ends. Reading and writing extend it by their
    size."""

    stop_seconds: Annotated[Number, Field(ge=1)] = 30.0
    """Timeout for a process without a heartbeat after SIGTERM or Ctrl-C, after which it exits without saving; at least
    twice the longest step so far."""

    fsdp: FsdpSection = FsdpSection()
    """Options of fsdp2."""
