"""The checkpoints of a run in progress: it goes on from one, saves others and removes old ones."""

from __future__ import annotations

from pathlib import Path

from accelerate.utils import gather_object

from halftune.core.log import get_logger
from halftune.train.callback import CallbackList
from halftune.train.checkpoint.checkpoint import checkpoint_errors, load_checkpoint, save_checkpoint
from halftune.train.checkpoint.resume import (
    move_later_checkpoints,
    restore_place,
    warn_changed_steps,
    warn_other_metrics,
    with_micro_batch,
)
from halftune.train.numeric_environment import (
    numeric_environment,
    random_state,
    restore_random_state,
    warn_other_environment,
)
from halftune.train.parallel.processes import barrier
from halftune.train.run_folder.checkpoints import PREFIX, rotate
from halftune.train.state import TrainState

log = get_logger(__name__)


def restore(run: TrainState, callbacks: CallbackList) -> None:
    """Begin where ``run.resume_from`` ended, or at the first step; calls ``on_start`` of the callbacks.

    Raises:
        TrainingError: the checkpoint cannot be read.
    """
    checkpoint, randoms = run.resume_from, list[dict]()
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, run)
        randoms = state["random"]
        with checkpoint_errors(checkpoint):
            run.feed = with_micro_batch(run.feed, state["micro_batch"])
            restore_place(run, state["stream"])
            callbacks.restore(state["callbacks"])
            before = float(state["schedule"]["_last_lr"][0])
        if run.is_main:
            warn_other_metrics(run.folder, checkpoint, state["callbacks"])
        log.info("resuming from %s", checkpoint)
        run.changes.warn(main=run.is_main)
        warn_other_environment(state["made_with"], numeric_environment(run))
        warn_changed_steps((state["total_steps"], run.total_steps), (before, run.rate))
    if run.is_main:
        move_later_checkpoints(run.folder, run.step)
        remove_old(run)  # a kill may have come before
    callbacks.tell("on_start", run)
    barrier(run.processes)  # some of them work on the main process alone
    rank = run.accelerator.process_index
    if checkpoint is not None and rank < len(randoms):
        with checkpoint_errors(checkpoint):
            restore_random_state(randoms[rank], run.device)  # last, so that nothing above has drawn from it


def save(run: TrainState, callbacks: CallbackList) -> None:
    """Write a checkpoint of the present step; all processes call it together.

    Raises:
        TrainingError: it cannot be written.
    """
    randoms = gather_object([random_state(run.device)])
    places = gather_object([run.feed.place(run.step)])
    folder = save_checkpoint(run, randoms, callbacks.states(), places)
    if folder is not None:
        remove_old(run)
        callbacks.tell("on_save", run, folder)
    barrier(run.processes)
    run.saved = run.step


def remove_old(run: TrainState) -> None:
    """Remove old checkpoints, except the best one and the one that ``training.resume`` names."""
    needed = {run.folder / f"{PREFIX}{run.best[0]}"} if run.best else set()
    if run.began:
        needed.add(Path(run.began))
    rotate(run.folder, run.config.training.save_total_limit, needed)
