"""The loss of the evaluation set. Where memory runs out, the evaluation is repeated with smaller batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.methods import Loss
from halftune.train.batches.feed import Feed
from halftune.train.callback import EVAL_SET, Averages
from halftune.train.loop.out_of_memory import first_line, free_memory, out_of_memory, remedies, rows_of, smaller
from halftune.train.loop.step import asked, forward_pass, sum_losses
from halftune.train.parallel.processes import sum_over_processes
from halftune.train.run_folder.checkpoints import intact
from halftune.train.state import TrainState
from halftune.train.window import ratios

log = get_logger(__name__)


def evaluate(run: TrainState, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """``eval_loss`` over the evaluation split, and the method's metrics; the same for any number of processes.

    An evaluation set with a name is measured by itself: ``eval_loss_NAME`` is its loss. ``eval_loss`` is that of all
    samples together, each set weighted by its number of trained tokens, or by what the method counts.

    If memory runs out, ``run.eval_feed`` is replaced by one with smaller batches and the evaluation starts again.

    Args:
        run: its ``eval_feed`` is evaluated.
        should_stop: called before every batch; true stops the evaluation.

    Returns:
        the metrics; None if a process stopped the evaluation.

    Raises:
        TrainingError: memory runs out with one row, or on one process of several that share the weights.
    """
    while True:
        feed = run.eval_feed
        assert feed is not None
        try:
            return _measured(run, feed, should_stop)
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
def _measured(run: TrainState, feed: Feed, should_stop: Callable[[], bool]) -> dict[str, float] | None:
    # By the model as built: processes may run different numbers of batches, and a wrapped one would wait for the
    # others. Where it is sharded, they run equally many and leave together.
    losses: dict[str, list[Loss]] = {name: [] for name in feed.sets}
    weights = dict.fromkeys(losses, 0.0)
    training = run.model.training
    run.model.eval()
    left, together = False, run.strategy.sharded
    feeds = ((name, batches) for name, one in feed.sets.items() for batches in one.once())
    try:
        for name, batches in feeds:
            left = should_stop()
            if together:
                left = sum_over_processes(run.accelerator, [float(left)])[0] > 0
            if left:
                break
            answered = batches if run.rollouts is None else run.rollouts(batches, feed)
            for batch in (one for one in answered if one.weight or together):
                with forward_pass(run):
                    losses[name].append(run.method.evaluate(*asked(run, run.model, batch, run.eval_reference)))
                weights[name] += batch.weight
    finally:
        feeds.close()
        run.model.train(training)
        run.strategy.after_evaluation(run.model)
    *sums, leaving = sum_over_processes(run.accelerator, [*weights.values(), float(left)])
    found = [sum_losses(run, losses[name]) for name in losses]
    return None if leaving else _eval_metrics(dict(zip(weights, sums, strict=True)), found)


def _eval_metrics(weights: dict[str, float], found: Sequence[tuple[float, Averages]]) -> dict[str, float]:
    """Metrics from the weights of the evaluation sets, and their sums of losses and averages in the same order.

    The loss of a set without weight, such as one of prompts without a judged answer, is NaN.
    """
    totals = [total for total, _ in found]
    metrics = {"eval_loss": sum(totals) / (sum(weights.values()) or math.nan)}
    for (name, weight), total in zip(weights.items(), totals, strict=True):
        if name:
            metrics[f"{EVAL_SET}{name}"] = total / (weight or math.nan)
    return metrics | {f"eval_{name}": value for name, value in ratios([one for _, one in found]).items()}
