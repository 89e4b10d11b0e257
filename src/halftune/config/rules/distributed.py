"""Rules between the keys of ``distributed``."""

from __future__ import annotations

from collections.abc import Iterator

from halftune.config.rules.finding import Context, Finding
from halftune.config.run import RunConfig
from halftune.config.sections.distributed import FsdpSection


def machines_know_each_other(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Several machines need one to meet at; one needs nothing."""
    asked = run.distributed
    if asked.num_machines == 1:
        for key, given in {"machine_rank": asked.machine_rank > 0, "main_process_ip": asked.main_process_ip}.items():
            if given:
                what = "has no effect with one machine"
                yield Finding(("distributed", key), what, "distributed.num_machines: 2 or more, or remove it")
        return
    if asked.machine_rank >= asked.num_machines:
        what = f"{asked.machine_rank} is no machine of {asked.num_machines}: they are counted from 0"
        yield Finding(("distributed", "machine_rank"), what, f"0 to {asked.num_machines - 1}")


def processes_divide_by_machines(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Every machine runs equally many."""
    asked = run.distributed
    if asked.num_processes is not None and asked.num_processes % asked.num_machines:
        what = f"{asked.num_processes} processes do not divide by {asked.num_machines} machines"
        remedy = "it counts the processes of all machines together"
        yield Finding(("distributed", "num_processes"), what, remedy)


def shards_are_fsdps(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Options of fsdp2 have no effect with another strategy."""
    asked = run.distributed
    if asked.strategy in ("ddp", "deepspeed") and asked.fsdp != FsdpSection():
        yield Finding(("distributed", "fsdp"), f"has no effect with strategy: {asked.strategy}", "strategy: fsdp2")


DISTRIBUTED_RULES = (
    (
        machines_know_each_other,
        "distributed.num_machines",
        "distributed.machine_rank",
        "distributed.main_process_ip",
    ),
    (processes_divide_by_machines, "distributed.num_processes", "distributed.num_machines"),
    (shards_are_fsdps, "distributed.strategy", "distributed.fsdp"),
)
