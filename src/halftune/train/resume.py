"""Going on with a run: whether its data is still the same, and what of the folder belongs to another course of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list

from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.plan import Plan
from halftune.train.callbacks.metrics import NAME as METRICS
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.checkpoint import read_state
from halftune.train.checkpoint_list import folders, step_of
from halftune.train.feed import Feed
from halftune.train.folder import RunFolder, set_aside

log = get_logger(__name__)


def agreed(folder: RunFolder, processes: int) -> RunFolder:
    """The main process's choice of a checkpoint, on every process: only that one reads checksums."""
    if processes == 1:
        return folder
    choice: list[Any] = [folder.resume_from]
    broadcast_object_list(choice)
    return replace(folder, resume_from=choice[0])


def position(feed: Feed) -> dict[str, Any]:
    """What must not change while a run goes on, because its position in the data is a number of steps.

    The samples, the rows of a step, and the first epoch: the order and packing of its rows and their split into steps.
    """
    order = hashlib.sha256()
    for batch in feed.batches(0):
        for row in batch:
            order.update(np.asarray(row, dtype=np.int64).tobytes() + b"|")
        order.update(b"\n")
    return {
        "rows_per_step": feed.rows_per_step,
        "data": feed.fingerprint(),
        "order": order.hexdigest(),
        "steps_in_epoch": feed.steps_in(0),
    }


def check_same_data(now: dict[str, Any], total_steps: int, checkpoint: Path, *, other_tokens: bool = False) -> None:
    """Refuses to go on with other data or another global batch, before anything in the run folder changes.

    Args:
        now: this run's :func:`position`.
        total_steps: how long it is to be.
        checkpoint: what it would go on from.
        other_tokens: the samples and their order may have changed; the run goes on at the same step of the new order.

    Raises:
        ConfigError: says what differs.
    """
    state = read_state(checkpoint)
    before = state["position"]
    if state["step"] > total_steps:
        raise ConfigError(
            f"the run has taken {state['step']} steps already and is to be {total_steps} steps long",
            where=str(checkpoint),
            remedy="set max_steps or num_train_epochs back, or name an earlier checkpoint with resume: PATH",
        )
    if before["rows_per_step"] != now["rows_per_step"]:
        raise ConfigError(
            f"the run took {before['rows_per_step']} rows a step, now {now['rows_per_step']}",
            where=str(checkpoint),
            remedy="keep per_device_train_batch_size × gradient_accumulation_steps × processes the same",
        )
    if other_tokens:
        if before != now:
            log.warning("the tokens or their order changed, which training.allow_changes permits")
        return
    if before["data"] != now["data"]:
        raise ConfigError(
            "the tokens of the training data are not what the run began with (another version of halftune)",
            where=str(checkpoint),
            remedy="go on with what it began with, start a new training.output_dir, "
            "or training.allow_changes: [train_data]",
        )
    if before != now:
        raise ConfigError(
            "the order of the data is not what the run began with (packing, or another version of halftune or NumPy)",
            where=str(checkpoint),
            remedy="go on with what it began with, or start a new training.output_dir",
        )


def split_as_before(plan: Plan, checkpoint: Path) -> Plan:
    """The plan with the global batch of a checkpoint, where more or fewer processes share it now.

    What changes is how many rows a process takes in one forward pass, no more than asked for, and how many passes it
    makes. With as many processes as before, the plan is left alone.

    Raises:
        ConfigError: so many processes cannot share that batch.
        TrainingError: the checkpoint cannot be read.
    """
    state, batch = read_state(checkpoint), plan.batch
    before, rows = len(state["random"]), state["position"]["rows_per_step"]
    if before == batch.world_size:
        return plan
    each, left = divmod(rows, batch.world_size)
    if left:
        raise ConfigError(
            f"the run takes {rows} rows a step, which {batch.world_size} processes cannot share",
            where=str(checkpoint),
            remedy=f"distributed.num_processes: a number that divides {rows}",
        )
    size = next(size for size in range(min(batch.micro_batch, each), 0, -1) if each % size == 0)
    log.info(
        "processes: %d before, %d now. A step has the same %d rows in the same order: each process makes %d forward "
        "passes of %d rows. Dropout, where there is any, draws other numbers",
        before,
        batch.world_size,
        rows,
        each // size,
        size,
    )
    return replace(plan, batch=replace(batch, micro_batch=size, accumulation=each // size))


def say_lost_metrics(folder: Path, checkpoint: Path, states: dict[str, dict[str, Any]]) -> None:
    """Warns where the metrics of a run are shorter than one of its own checkpoints knows.

    Args:
        folder: the run folder.
        checkpoint: what the run goes on from.
        states: of the callbacks, as the checkpoint has them.
    """
    written = states.get(MetricsFile.__name__, {}).get("bytes", 0)  # length of the file when that was written
    path = folder / METRICS
    size = path.stat().st_size if path.exists() else 0
    if size < written and checkpoint.resolve().parent == folder.resolve():
        log.warning("%s has %d bytes, expected at least %d: earlier metrics are lost", path, size, written)


def say_length(steps: tuple[int | None, int], rates: tuple[float, float]) -> None:
    """Says that the run is longer or shorter now, and what that does to the learning rate.

    Args:
        steps: of the whole run, when the checkpoint was written (None: not known) and now.
        rates: learning rate of the next step by the schedule of then and by that of now.
    """
    if steps[0] in (None, steps[1]):
        return
    log.warning(
        "the run is %d steps long now, not %d: the next step has the learning rate %.3g of the new schedule, it had "
        "%.3g by the old one, on which the steps so far were taken",
        steps[1],
        steps[0],
        rates[1],
        rates[0],
    )


def with_micro_batch(feed: Feed, used: Sequence[int]) -> Feed:
    """The feed in the micro-batches that the run had come to when memory ran out.

    Args:
        feed: as configured now.
        used: rows of a forward pass that had been configured, and that were used.
    """
    asked, size = used
    if size == asked or asked != feed.batch.micro_batch:
        return feed
    log.info("going on with %d rows a forward pass instead of %d: memory had run out", size, asked)
    rows = feed.batch.micro_batch * feed.batch.accumulation
    return replace(feed, batch=replace(feed.batch, micro_batch=size, accumulation=rows // size))


def set_later_aside(folder: Path, step: int) -> None:
    """Moves checkpoints after ``step`` out of the way: the run goes on from there on another course than theirs."""
    for path in folders(folder):
        if step_of(path) > step:
            set_aside(path, f"the run goes on from step {step}")
