"""The loss of each row: the sum over its trained tokens, in the batches of training's evaluation."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.evaluate.rows import TokenizedRows
from halftune.methods import make_method
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.vocabulary import padding_id
from halftune.plan import Plan
from halftune.precision.dtypes import autocast
from halftune.train.batches.feed import Feed
from halftune.train.loop.out_of_memory import out_of_memory, smaller
from halftune.train.setup import media_inputs

log = get_logger(__name__)


def feed_of(rows: TokenizedRows, model: nn.Module, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Feed:
    """Batches of the rows, packed where the plan packs, else of like lengths."""
    config = rows.config
    device = next(model.parameters()).device
    feed = Feed(
        rows.split,
        config,
        plan.batch,
        make_method(config.method),
        padding_id(model, tokenizer),
        device=device if device.type == "cuda" else None,
        samples=np.arange(rows.count),
        images=media_inputs(config, tokenizer),
    )
    return feed.for_evaluation(rows.split, config.training.per_device_eval_batch_size)


def row_losses(model: nn.Module, feed: Feed, plan: Plan) -> np.ndarray:
    """Sum of the negative log-probabilities in nats, and number of trained tokens, per row: fp64 ``[N, 2]``.

    Where memory runs out, the pass starts again with smaller batches.

    Args:
        model: on its device, in evaluation mode.
        feed: of :func:`feed_of`.
        plan: gives autocast.

    Raises:
        TrainingError: memory runs out with one row.
    """
    while True:
        try:
            return _measured(model, feed, plan)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            halved = smaller(feed.batch)
            if halved is None:
                remedy = "use a shorter data.max_length, or another attention"
                raise TrainingError("out of memory with one row", remedy=remedy, code="train.out_of_memory") from error
        log.warning("out of memory: from now on %d rows at a time", halved.micro_batch)
        feed = replace(feed, batch=halved)


@torch.no_grad()
def _measured(model: nn.Module, feed: Feed, plan: Plan) -> np.ndarray:
    assert feed.samples is not None
    found, policy, device = np.zeros((len(feed.samples), 2)), PolicyModel(model), next(model.parameters()).device
    with closing(feed.once()) as steps:
        for batch in chain.from_iterable(steps):
            with autocast(plan.precision, device):
                batch = batch.to(device)
                sums, counts = policy.sequence_logprobs(batch), policy.label_counts(batch)
            pair = torch.stack([-sums, counts], dim=1).cpu().double().numpy()
            np.add.at(found, list(batch.examples), pair)
    return found
