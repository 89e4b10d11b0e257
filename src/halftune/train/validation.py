"""Evaluation: the method's loss and metrics over the evaluation split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.model.policy import PolicyModel
from halftune.train.callbacks.nonfinite import intact
from halftune.train.callbacks.window import ratios
from halftune.train.feed import Feed
from halftune.train.processes import sum_over_processes
from halftune.train.state import TrainState
from halftune.train.step import forward_pass, summed
from halftune.train.step_recovery import first_line, free_memory, out_of_memory, remedies, rows_of, smaller

log = get_logger(__name__)


def evaluate(run: TrainState, abandoned: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """``eval_loss`` over the evaluation split, and the method's metrics; the same for any number of processes.

    Where memory runs out, ``run.eval_feed`` is made to give smaller batches. None where a process left in the middle.

    Args:
        run: its ``eval_feed`` is evaluated.
        abandoned: asked before every batch; true leaves at once.

    Raises:
        TrainingError: memory runs out with one row, or on one process of several that share the weights.
    """
    while True:
        feed = run.eval_feed
        assert feed is not None
        try:
            return _measured(run, feed, abandoned)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            halved = smaller(feed.batch)
            # the others wait in the middle of this forward pass where each has a share of the weights
            if halved is None or run.config.training.on_out_of_memory == "stop" or run.strategy.sharded:
                less = "" if halved is None else "a smaller training.per_device_eval_batch_size, "
                raise TrainingError(
                    f"out of memory in the evaluation, {rows_of(feed.batch, 'at a time')}: {first_line(error)}",
                    remedy=f"{less}{remedies(run)}; {intact(run.folder)}",
                    code="train.out_of_memory",
                ) from error
        log.warning("out of memory in the evaluation: from now on %d rows at a time", halved.micro_batch)
        run.eval_feed = replace(feed, batch=halved)
        free_memory(run.device)


@torch.no_grad()
def _measured(run: TrainState, feed: Feed, abandoned: Callable[[], bool]) -> dict[str, float] | None:
    # By the model as built: processes may run different numbers of batches, and a wrapped one would wait for the
    # others. Where it is sharded, they run equally many and leave together.
    losses, weight = [], 0.0
    training = run.model.training
    run.model.eval()
    left, together = False, run.strategy.sharded
    try:
        for batches in feed.once():
            left = abandoned()
            if together:
                left = sum_over_processes(run.accelerator, [float(left)])[0] > 0
            if left:
                break
            for batch in batches:
                if batch.weight or together:
                    with forward_pass(run):
                        losses.append(run.method.loss(PolicyModel(run.model), batch.to(run.device)))
                    weight += batch.weight
    finally:
        run.model.train(training)
        run.strategy.after_evaluation(run.model)
    weight, leaving = sum_over_processes(run.accelerator, [weight, float(left)])
    total, averages = summed(run, losses)
    if leaving:
        return None
    metrics = {f"eval_{name}": value for name, value in ratios([averages]).items()}
    return {"eval_loss": total / (weight or 1.0), **metrics}
