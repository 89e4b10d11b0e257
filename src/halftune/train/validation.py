"""Evaluation loss: the mean cross-entropy over the labelled tokens of the evaluation split."""

from __future__ import annotations

import torch
from torch import nn

from halftune.train.feed import Feed
from halftune.train.processes import sum_over_processes
from halftune.train.step import Stepper


@torch.no_grad()
def evaluate(stepper: Stepper, model: nn.Module, feed: Feed) -> float:
    """Mean cross-entropy in nats over all labelled tokens of ``feed``, the same for any number of processes.

    Args:
        stepper: gives devices, processes and autocast.
        model: unwrapped: processes may run different numbers of batches, and a wrapped one would wait for the others.
        feed: the evaluation split.
    """
    rows, size = feed.rows(epoch=0), feed.rows_per_step
    loss, count = 0.0, 0
    training = model.training
    model.eval()
    for start in range(0, len(rows), size):
        for batch in feed.micro_batches(rows[start : start + size]):
            if batch.tokens_trained:
                loss += float(stepper.forward(batch, model))
                count += batch.tokens_trained
    model.train(training)
    total, counted = sum_over_processes(stepper.accelerator, [loss, count])
    return total / max(counted, 1.0)
