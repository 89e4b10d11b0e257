"""Rules between the keys of ``distributed``."""

from __future__ import annotations

from collections.abc import Iterator

from halftune.config.rules.rule import Context, Violation, rule
from halftune.config.run import RunConfig
from halftune.config.sections.distributed import FsdpSection


@rule("config.no_effect", "distributed.num_machines", "distributed.machine_rank", "distributed.main_process_ip")
def machines_know_each_other(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options for several machines have no effect with one."""
    asked = run.distributed
    if asked.num_machines == 1:
        for key, given in {"machine_rank": asked.machine_rank > 0, "main_process_ip": asked.main_process_ip}.items():
            if given:
                what = "has no effect with one machine"
                yield Violation(("distributed", key), what, "set distributed.num_machines ≥ 2, or remove it")
        return
    if asked.machine_rank >= asked.num_machines:
        what = f"expected an integer from 0 to {asked.num_machines - 1}, got {asked.machine_rank}"
        yield Violation(("distributed", "machine_rank"), what, "count machines from 0", code="config.out_of_range")


@rule("config.process_count_invalid", "distributed.num_processes", "distributed.num_machines")
def processes_divide_by_machines(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Every machine runs the same number of processes."""
    asked = run.distributed
    if asked.num_processes is not None and asked.num_processes % asked.num_machines:
        what = f"{asked.num_processes} processes are not divisible by {asked.num_machines} machines"
        remedy = "set the total number of processes on all machines"
        yield Violation(("distributed", "num_processes"), what, remedy)


@rule("config.no_effect", "distributed.strategy", "distributed.fsdp")
def shards_are_fsdps(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options of fsdp2 have no effect with another strategy."""
    asked = run.distributed
    if asked.strategy in ("ddp", "deepspeed") and asked.fsdp != FsdpSection():
        yield Violation(
            ("distributed", "fsdp"), f"has no effect with strategy: {asked.strategy}", "set strategy: fsdp2"
        )
