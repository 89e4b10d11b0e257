"""The ``distributed`` section: how many processes, on how many machines, and how they share a model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.section import LISTED, Flag, Int, Number, Section


class FsdpSection(Section):
    """Options of `strategy: fsdp2`."""

    wrap: Annotated[tuple[str, ...], LISTED] = ()
    """Class names of the modules whose weights are gathered one after the other; by default the decoder layers."""

    reshard_after_forward: Flag = True
    """Let a layer's gathered weights go after its forward pass and gather them again for the backward pass: less
    memory, half as much communication again."""

    sync_each_batch: Flag | Literal["auto"] = "auto"
    """Sum gradients over processes after every micro-batch of a step. Otherwise once a step, which sends less and keeps
    whole gradients on each device in between. `auto`: once a step where the estimate says that these fit."""

    cpu_offload: Flag = False
    """Keep shards, their gradients and the optimizer's state in main memory, and update there."""


class DistributedSection(Section):
    """Several devices and machines. `distributed: fsdp2` is short for `distributed: {strategy: fsdp2}`."""

    word: ClassVar[str | None] = "strategy"

    strategy: Literal["auto", "ddp", "fsdp2", "deepspeed"] = "auto"
    """`ddp`: a whole model on each device; `fsdp2`: each holds a share of weights, gradients and optimizer state.
    `auto`: ddp where the estimate says that a whole one fits, else fsdp2."""

    num_processes: Annotated[Int, Field(ge=1)] | None = None
    """Processes over all machines, one device each; by default one per visible device, and one on a CPU."""

    num_machines: Annotated[Int, Field(ge=1)] = 1
    """Machines that train together; each starts the same command, with its own `machine_rank`."""

    machine_rank: Annotated[Int, Field(ge=0)] = 0
    """Which of the machines this one is, from 0."""

    main_process_ip: str | None = None
    """Name or address of machine 0, as the others reach it."""

    main_process_port: Annotated[Int, Field(ge=1024, le=65534)] = 29500
    """Port on which processes meet. With several machines the next one is used, too: open both."""

    max_restarts: Annotated[Int, Field(ge=0)] = 0
    """How often a job in which a process fails is started again, from its newest valid checkpoint."""

    timeout_seconds: Annotated[Number, Field(ge=5)] = 600.0
    """How long processes wait for one that gives no sign of life before the job ends. Reading and writing have longer,
    by their bytes."""

    stop_seconds: Annotated[Number, Field(ge=1)] = 30.0
    """How long a process that was asked to stop (SIGTERM, Ctrl-C) may go without a sign of life before it ends without
    saving; at least twice what a step has taken so far."""

    fsdp: FsdpSection = FsdpSection()
    """Options of fsdp2."""
