"""Evaluation loss: the mean cross-entropy over the labelled tokens of the evaluation split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from halftune.train.feed import Feed
from halftune.train.processes import sum_over_processes
from halftune.train.step import Stepper


@torch.no_grad()
def evaluate(
    stepper: Stepper, model: nn.Module, feed: Feed, abandoned: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean cross-entropy in nats over all labelled tokens of ``feed``, the same for any number of processes.

    None where a process left in the middle.

    Args:
        stepper: gives devices, processes and autocast.
        model: unwrapped: processes may run different numbers of batches, and a wrapped one would wait for the others.
            Where it is sharded, they run equally many and leave together.
        feed: the evaluation split.
        abandoned: asked before every batch; true leaves at once.
    """
    loss, count = 0.0, 0
    training = model.training
    model.eval()
    left, together = False, stepper.strategy.sharded
    try:
        for batches in feed.once():
            left = abandoned()
            if together:
                left = sum_over_processes(stepper.accelerator, [float(left)])[0] > 0
            if left:
                break
            for batch in batches:
                if batch.tokens_trained or together:
                    loss += float(stepper.forward(batch, model))
                    count += batch.tokens_trained
    finally:
        model.train(training)
        stepper.strategy.after_evaluation(model)
    total, counted, leaving = sum_over_processes(stepper.accelerator, [loss, count, float(left)])
    if leaving:
        return None
    return total / max(counted, 1.0)
