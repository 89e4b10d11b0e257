"""Batches of answers, as the feed makes them of examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from halftune.data.batch import LABEL_POSITIONS, WEIGHT, Batch, collate
from halftune.data.store import NO_LABEL, Example
from halftune.train.batches.feed import Feed


def batch_of(
    examples: Sequence[Example],
    weights: Sequence[float],
    columns: Mapping[str, torch.Tensor],
    source: Batch,
    feed: Feed,
    *,
    packed: bool,
) -> Batch:
    """A batch of examples with answers.

    Args:
        examples: E examples.
        weights: of each.
        columns: besides the weights.
        source: the batch that the prompts came from.
        feed: that it is of.
        packed: in one row.
    """
    made = collate(list(examples), feed.pad_token_id, packed=packed)
    predicted = made.tokens["labels"][:, 1:] != NO_LABEL
    segments = [one for example in examples for one in example.segments]
    return replace(
        made,
        extras={**made.extras, LABEL_POSITIONS: predicted.any(dim=0).nonzero().squeeze(1)},
        columns={WEIGHT: torch.tensor(weights), **columns},
        weight=sum(weights),
        fed=made.tokens["labels"].numel(),
        real=sum(len(one.input_ids) for one in segments),
        trained=sum(int(one.loss_mask[1:].sum()) for one in segments),
        examples=source.examples,
    )
