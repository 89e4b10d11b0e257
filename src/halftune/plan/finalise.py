"""Finalises a plan: checks at the start of a run may overrule decisions made from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from halftune.core.choice import Choice
from halftune.core.errors import ConfigError, PlanError
from halftune.core.log import get_logger
from halftune.plan.tree import Plan, unpacked

log = get_logger(__name__)


@dataclass(frozen=True)
class ResumedBatch:
    """How the run of a checkpoint split its global batch.

    Attributes:
        checkpoint: the folder.
        rows: rows of an optimizer step.
        processes: how many shared them.
    """

    checkpoint: Path
    rows: int
    processes: int


@dataclass(frozen=True)
class Evidence:
    """What is known of a run before its weights are read.

    Attributes:
        packing: verdict of the check on a small copy of the model; None where rows are not packed.
        packing_asked: whether packing was asked for, not chosen by ``auto``.
        resumed: the checkpoint that is resumed from; None in a new run.
    """

    packing: Choice[bool] | None = None
    packing_asked: bool = False
    resumed: ResumedBatch | None = None


def finalise(plan: Plan, evidence: Evidence) -> Plan:
    """The plan that a run is carried out by; nothing changes it any more.

    Raises:
        PlanError: packing was asked for, and the model would mix the samples of a row.
        ConfigError: these processes cannot share the global batch of the checkpoint.
    """
    if evidence.resumed is not None:
        plan = _with_batch_of(plan, evidence.resumed)
    if evidence.packing is None:
        return plan
    reason = evidence.packing.reason
    if evidence.packing.value:
        log.info("packing: %s", reason)
        return plan
    if evidence.packing_asked:
        what = f"packing is not possible: {reason}"
        raise PlanError(what, remedy="data.packing: false", code="attention.packing_unsupported")
    log.warning("packing is off: %s", reason)
    teacher = unpacked(plan.teacher, reason) if plan.teacher is not None else None
    return replace(unpacked(plan, reason), teacher=teacher, warnings=(*plan.warnings, f"Packing is off: {reason}."))


def _with_batch_of(plan: Plan, resumed: ResumedBatch) -> Plan:
    """With the global batch of the checkpoint, where more or fewer processes share it now.

    What changes is how many rows a process takes in one forward pass, no more than asked for, and how many passes it
    makes. With as many processes as before, the plan is left alone.
    """
    batch = plan.batch
    if resumed.processes == batch.world_size:
        return plan
    each, left = divmod(resumed.rows, batch.world_size)
    if left:
        what = f"the run takes {resumed.rows} rows a step, which {batch.world_size} processes cannot share"
        remedy = f"distributed.num_processes: a number that divides {resumed.rows}"
        raise ConfigError(what, where=str(resumed.checkpoint), remedy=remedy, code="train.rows_not_divisible")
    size = next(size for size in range(min(batch.micro_batch, each), 0, -1) if each % size == 0)
    log.info(
        "processes: %d before, %d now. A step has the same %d rows in the same order: each process makes %d forward "
        "passes of %d rows. Dropout, where there is any, draws other numbers",
        resumed.processes,
        batch.world_size,
        resumed.rows,
        each // size,
        size,
    )
    return replace(plan, batch=replace(batch, micro_batch=size, accumulation=each // size))
