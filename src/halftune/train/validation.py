"""Evaluation loss: the mean cross-entropy over the labelled tokens of the evaluation split."""

from __future__ import annotations

import torch

from halftune.train.feed import Feed
from halftune.train.step import Stepper


@torch.no_grad()
def evaluate(stepper: Stepper, feed: Feed) -> float:
    """Mean cross-entropy in nats over all labelled tokens of ``feed``, the same for any number of processes."""
    rows, size = feed.rows(epoch=0), feed.rows_per_step
    loss = torch.zeros(2, dtype=torch.float64)
    training = stepper.model.training
    stepper.model.eval()
    for start in range(0, len(rows), size):
        for batch in feed.micro_batches(rows[start : start + size]):
            if batch.tokens_trained:
                loss += torch.tensor([float(stepper.forward(batch)), batch.tokens_trained])
    stepper.model.train(training)
    total, count = stepper.accelerator.reduce(loss.to(stepper.accelerator.device), reduction="sum")  # type: ignore[misc]
    return float(total) / max(float(count), 1.0)
