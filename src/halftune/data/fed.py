"""How much of what training is fed is not padding, with packed rows and with padded batches."""

from __future__ import annotations

import numpy as np

from halftune.config.run import RunConfig
from halftune.data.order import BatchRule, Row, epoch_rows, padded_batches, round_up
from halftune.data.report import Efficiency
from halftune.plan.batch import batch_size


def efficiency(lengths: np.ndarray, config: RunConfig) -> Efficiency:
    """What an epoch of one process comes to.

    Args:
        lengths: int[N], tokens of each training sample.
        config: its batch size, accumulation, grouping, ``max_length`` and seed are read.
    """
    seed, capacity = config.training.seed, config.data.max_length
    rows, tokens = batch_size(config)
    forwards = config.training.gradient_accumulation_steps
    rule = BatchRule(rows * forwards, tokens, forwards, config.data.group_by_length)
    batches = padded_batches(lengths, rule, epoch=0, seed=seed)
    fed = sum(padded_tokens(batch, micro_batch_rows(batch, rows, tokens)) for batch in batches)
    split = config.data.packing.split
    packed_rows = len(epoch_rows(lengths, epoch=0, seed=seed, packing=True, capacity=capacity, split=split))
    real = int(lengths.sum())
    return Efficiency(rows, real / max(fed, 1), real / max(packed_rows * capacity, 1), packed_rows, tokens)


def micro_batch_rows(batch: list[Row], rows: int, tokens: int | None) -> int:
    """Rows of a forward pass of a global batch that begins with its longest."""
    return rows if tokens is None or not batch else max(1, tokens // round_up(batch[0][0].stop))


def padded_tokens(batch: list[Row], rows: int) -> int:
    """Fed tokens of a global batch that goes through the model so many rows at a time."""
    parts = [batch[start : start + rows] for start in range(0, len(batch), rows)]
    return sum(len(part) * round_up(max(row[0].stop for row in part)) for part in parts)
