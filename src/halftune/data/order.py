"""The order of an epoch: which samples make which row, which rows which global batch.

The same for every number of processes and workers, and for every split of the global batch into forward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from halftune.data.packing import best_fit_decreasing

MULTIPLE = 8  # matrix units want sizes that are multiples of 8
# Global batches whose samples are sorted by length together. More would cut little more padding and mix less; the
# number is that of transformers' length-grouped sampler.
MEGABATCH = 50
# An epoch has at least so many of them, so that short ones are shuffled too.
MEGABATCHES = 4


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sample; a whole sample is the span from 0 to its length."""

    sample: int
    start: int
    stop: int


Row = tuple[Span, ...]


@dataclass(frozen=True)
class BatchRule:
    """How rows make global batches.

    Attributes:
        rows: of a global batch (of a full one: the last of an epoch may have fewer).
        tokens: instead, without packing: as many rows as fit into this many tokens of each of its forward passes.
        forwards: the forward passes of a global batch over all processes; only read with ``tokens``.
        grouped: rows of like length make a batch.
    """

    rows: int
    tokens: int | None = None
    forwards: int = 1
    grouped: bool = False

    def fitting(self, longest: int) -> int:
        """Rows of a global batch whose longest sample has so many tokens."""
        return self.rows if self.tokens is None else self.forwards * max(1, self.tokens // round_up(longest))


def round_up(length: int) -> int:
    """Tokens of a padded row."""
    return -(-length // MULTIPLE) * MULTIPLE


def epoch_rows(
    lengths: np.ndarray, *, epoch: int, seed: int, packing: bool, capacity: int, split: bool = False
) -> list[Row]:
    """Rows of samples in random order.

    Args:
        lengths: int[N], tokens of each sample, at most ``capacity``.
        epoch: 0 for the first; every epoch has another order.
        seed: ``training.seed``.
        packing: put several samples into a row, by best-fit-decreasing; otherwise one sample a row.
        capacity: tokens of a row.
        split: with packing, fill every row to the last token and cut the sample that does not fit.

    Returns:
        Every token of every sample once. A function of the arguments alone; with packing, the number of rows depends
        on the lengths only.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths)).tolist()
    sizes = np.asarray(lengths).tolist()
    if packing and split:
        return _filled(sizes, order, capacity)
    whole = [Span(index, 0, sizes[index]) for index in order]
    if not packing:
        return [(span,) for span in whole]
    bins = best_fit_decreasing([span.stop for span in whole], capacity)
    rows = [tuple(whole[place] for place in packed) for packed in bins]
    return [rows[index] for index in random.permutation(len(rows))]


def packed_batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Global batches of ``size`` rows, the last one with what is left."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def padded_batches(lengths: np.ndarray, rule: BatchRule, *, epoch: int, seed: int) -> list[list[Row]]:
    """Global batches of one sample a row, each from the longest sample to the shortest.

    The order inside a global batch changes nothing but padding, as the loss is that of the whole batch. Across batches
    ``rule.grouped`` sorts samples by length inside groups of 50 batches of the epoch's random order, and then shuffles
    the batches of the whole epoch. The batch with the longest forward pass opens the first epoch, so that memory that
    does not suffice shows at once.

    Returns:
        Every sample once. A function of the arguments alone.
    """
    sizes = np.asarray(lengths)
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(sizes))
    if rule.grouped:
        order = _sorted_in_groups(order, sizes, rule)
    batches = _cut(order, sizes, rule)
    if rule.grouped:
        batches = [batches[index] for index in random.permutation(len(batches))]
    batches = [sorted(batch, key=lambda span: -span.stop) for batch in batches]
    if epoch == 0 and batches:
        longest = max(range(len(batches)), key=lambda index: _cost(batches[index], rule))
        batches[0], batches[longest] = batches[longest], batches[0]
    return [[(span,) for span in batch] for batch in batches]


def by_length(lengths: np.ndarray, rule: BatchRule) -> list[list[Row]]:
    """Global batches of one sample a row, the longest samples first: the least padding, for evaluation."""
    sizes = np.asarray(lengths)
    batches = _cut(np.argsort(-sizes, kind="stable"), sizes, rule)
    return [[(span,) for span in batch] for batch in batches]


def _sorted_in_groups(order: np.ndarray, sizes: np.ndarray, rule: BatchRule) -> np.ndarray:
    """Samples sorted by length in each group of the order, every other group upwards, so that no batch is uneven."""
    rows = rule.fitting(int(sizes.mean())) if len(sizes) else 1
    batches = min(MEGABATCH, -(-len(order) // (rows * MEGABATCHES)))
    group = np.arange(len(order)) // (rows * batches)
    downwards = np.where(group % 2, 1, -1) * sizes[order]
    return order[np.lexsort((downwards, group))]


def _cut(order: np.ndarray, sizes: np.ndarray, rule: BatchRule) -> list[list[Span]]:
    batches: list[list[Span]] = []
    batch: list[Span] = []
    longest = 0
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if batch and len(batch) >= rule.fitting(max(longest, size)):
            batches.append(batch)
            batch, longest = [], 0
        batch.append(Span(index, 0, size))
        longest = max(longest, size)
    return [*batches, batch] if batch else batches


def _cost(batch: list[Span], rule: BatchRule) -> tuple[int, int]:
    """Tokens of the largest forward pass, then its longest sample; ``batch`` begins with its longest."""
    longest = batch[0].stop
    rows = min(len(batch), rule.fitting(longest) if rule.tokens is None else rule.tokens // round_up(longest))
    return rows * round_up(longest), longest


def _filled(sizes: list[int], order: list[int], capacity: int) -> list[Row]:
    rows: list[Row] = []
    row: list[Span] = []
    room = capacity
    for index in order:
        start = 0
        while start < sizes[index]:
            stop = min(sizes[index], start + room)
            row.append(Span(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                rows.append(tuple(row))
                row, room = [], capacity
    return [*rows, tuple(row)] if row else rows
