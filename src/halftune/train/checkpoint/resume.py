"""Resume from a checkpoint: check that the data is unchanged, agree on the checkpoint, move later ones away.

Whether a run starts, resumes or is finished: ``train.run_folder.start_or_resume``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.core.processes.process import this_process
from halftune.core.run_metrics import NAME as METRICS
from halftune.core.run_metrics import digest
from halftune.plan.finalise import ResumedBatch
from halftune.train.batches.feed import Feed
from halftune.train.callbacks.metrics import MetricsFile
from halftune.train.checkpoint.checkpoint import read_state
from halftune.train.parallel.processes import barrier
from halftune.train.run_folder.checkpoints import find_damage, folders, newest_valid, step_of
from halftune.train.run_folder.start_or_resume import RunFolder, move_aside
from halftune.train.state import TrainState

log = get_logger(__name__)


def choose_checkpoint(folder: RunFolder, processes: int) -> Path | None:
    """The checkpoint to resume from, on every process: each reads the checksums of its share of the files.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged.
    """
    if processes == 1:
        return folder.resume_from
    listed: list[Any] = [folder.unverified]
    broadcast_object_list(listed)

    def wrong_with(checkpoint: Path) -> str:
        found = find_damage(checkpoint, thorough=True, share=(this_process().rank, processes))
        barrier(processes)
        return next(filter(None, gather_object([found])), "")

    return newest_valid(folder.path, listed[0], wrong_with)


def position(feed: Feed) -> dict[str, Any]:
    """Return what must stay the same between a checkpoint and its resume.

    A step number is the position in the data. It depends on the samples, the rows per step,
    and the first epoch: the order and packing of its rows and their split into steps.
    """
    return {
        "rows_per_step": feed.rows_per_step,
        "data": feed.fingerprint(),
        "order": feed.order(),
        "steps_in_epoch": 1 if feed.config.data.streaming.enabled else feed.steps_in(0),
    }


def check_same_data(run: TrainState) -> None:
    """Refuses to resume with other data or another global batch, before anything in the run folder changes.

    Where other tokens are allowed, the run goes on at the same step of the new order.

    Raises:
        ConfigError: says what differs.
    """
    if run.resume_from is None:
        return
    checkpoint, now, total_steps = run.resume_from, run.position, run.total_steps
    other_tokens = run.changes.tokens or "train_data" in run.config.training.allow_changes
    state = read_state(checkpoint)
    before = state["position"]
    if state["step"] > total_steps:
        raise ConfigError(
            f"the checkpoint is at step {state['step']}, but the run has only {total_steps} steps",
            where=str(checkpoint),
            remedy="set max_steps or num_train_epochs back, or name an earlier checkpoint with resume: PATH",
            code="train.run_changed",
        )
    if before["rows_per_step"] != now["rows_per_step"]:
        raise ConfigError(
            f"the run took {before['rows_per_step']} rows a step, now {now['rows_per_step']}",
            where=str(checkpoint),
            remedy="keep per_device_train_batch_size × gradient_accumulation_steps × processes the same",
            code="train.run_changed",
        )
    if other_tokens:
        if before != now:
            log.warning("the tokens or their order changed, which training.allow_changes permits")
        return
    if before["data"] != now["data"]:
        raise ConfigError(
            "the tokens of the training data differ from the checkpoint's (another version of halftune)",
            where=str(checkpoint),
            remedy="restore the original setup, start a new training.output_dir, "
            "or training.allow_changes: [train_data]",
            code="train.run_changed",
        )
    if before != now:
        raise ConfigError(
            "the order of the data differs from the checkpoint's (packing, or another version of halftune or NumPy)",
            where=str(checkpoint),
            remedy="restore the original setup, or start a new training.output_dir",
            code="train.run_changed",
        )


def resumed_batch(checkpoint: Path) -> ResumedBatch:
    """How the run of a checkpoint split its global batch.

    Raises:
        TrainingError: the checkpoint cannot be read.
    """
    state = read_state(checkpoint)
    return ResumedBatch(checkpoint, state["position"]["rows_per_step"], len(state["random"]))


def warn_other_metrics(folder: Path, checkpoint: Path, states: dict[str, dict[str, Any]]) -> None:
    """Warns where the metrics of a run are shorter than one of its own checkpoints knows, or others.

    Args:
        folder: the run folder.
        checkpoint: what the run goes on from.
        states: of the callbacks, as the checkpoint has them.
    """
    if checkpoint.resolve().parent != folder.resolve():
        return
    state = states.get(MetricsFile.__name__, {})
    written = state.get("bytes", 0)  # length of the file when the checkpoint was written
    path = folder / METRICS
    size = path.stat().st_size if path.exists() else 0
    if size < written:
        log.warning("%s has %d bytes, expected at least %d: earlier metrics are lost", path, size, written)
    elif state.get("sha256") not in (None, "", digest(folder, written)):  # none: a checkpoint of an earlier version
        log.warning("%s was changed after %s was saved: its metrics and curves may be wrong", path, checkpoint.name)


def warn_changed_steps(steps: tuple[int | None, int], rates: tuple[float, float]) -> None:
    """Says that the run is longer or shorter now, and what that does to the learning rate.

    Args:
        steps: of the whole run, when the checkpoint was written (None: not known) and now.
        rates: learning rate of the next step by the schedule of then and by that of now.
    """
    if steps[0] in (None, steps[1]):
        return
    log.warning(
        "the number of steps changed from %d to %d; the learning rate continues at %.3g (was %.3g)",
        steps[0],
        steps[1],
        rates[1],
        rates[0],
    )


def with_micro_batch(feed: Feed, used: Sequence[int]) -> Feed:
    """Return the feed with the micro-batch size that the run used after it ran out of memory.

    Args:
        feed: as configured now.
        used: rows of a forward pass that had been configured, and that were used.

    Raises:
        ValueError: they are no split of the global batch.
    """
    asked, size = used
    if size == asked or asked != feed.batch.micro_batch:
        return feed
    rows = feed.batch.micro_batch * feed.batch.accumulation
    if size > asked or rows % size:
        raise ValueError(f"micro-batches of {size} rows do not make {rows}")
    log.info("micro-batch of %d rows instead of %d: the run was out of memory before", size, asked)
    return replace(feed, batch=replace(feed.batch, micro_batch=size, accumulation=rows // size))


def restore_place(run: TrainState, places: Sequence[dict[str, Any] | None]) -> None:
    """Goes on reading streamed data where each process was; other data is read from its beginning.

    Raises:
        LookupError: the checkpoint has no place for this process.
    """
    if not run.config.data.streaming.enabled:
        return
    if "train_data" in run.config.training.allow_changes or run.changes.tokens:
        log.warning("streamed data begins at its first row: training.allow_changes permits other data")
        return
    run.feed.resume(run.step, places[run.accelerator.process_index])


def move_later_checkpoints(folder: Path, step: int) -> None:
    """Moves checkpoints after ``step`` out of the way: the run goes on from there on another course than theirs."""
    for path in folders(folder):
        if step_of(path) > step:
            move_aside(path, f"the run resumes from step {step}")
