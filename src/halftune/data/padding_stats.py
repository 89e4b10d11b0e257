"""Share of non-padding tokens in an epoch, packed and padded."""

from __future__ import annotations

from halftune.config.run import RunConfig
from halftune.data.order import BatchRule, Row, epoch_rows, padded_batches, round_up
from halftune.data.report import Efficiency
from halftune.data.split import TokenizedSplit
from halftune.plan.batch import batch_size


def efficiency(split: TokenizedSplit, config: RunConfig) -> Efficiency:
    """Compute the share of non-padding tokens in the first epoch of one process.

    Args:
        split: the training examples.
        config: reads batch size, accumulation, grouping, ``max_length`` and seed.
    """
    seed, segments = config.training.seed, config.method.segments
    capacity = config.data.max_length * segments
    rows, tokens = batch_size(config)
    forwards = config.training.gradient_accumulation_steps
    rule = BatchRule(rows * forwards, tokens, forwards, config.data.group_by_length, segments)
    batches = padded_batches(split.longest, rule, epoch=0, seed=seed)
    padded = segments * sum(padded_tokens(batch, micro_batch_rows(batch, rows, rule)) for batch in batches)
    lengths, cut = split.lengths, config.data.packing.split
    packed_rows = len(epoch_rows(lengths, epoch=0, seed=seed, packing=True, capacity=capacity, split=cut))
    real = int(lengths.sum())
    return Efficiency(rows, real / max(padded, 1), real / max(packed_rows * capacity, 1), packed_rows, tokens)


def micro_batch_rows(batch: list[Row], rows: int, rule: BatchRule) -> int:
    """Rows of a forward pass; the batch's longest row is its first."""
    return rows if rule.tokens is None else rule.rows_of(rule.tokens, batch[0][0].stop)


def padded_tokens(batch: list[Row], rows: int) -> int:
    """Tokens of a global batch, padding included, in forward passes of ``rows`` rows."""
    parts = [batch[start : start + rows] for start in range(0, len(batch), rows)]
    return sum(len(part) * round_up(max(row[0].stop for row in part)) for part in parts)
