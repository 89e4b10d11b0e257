"""The order of an epoch: samples to rows (best-fit-decreasing bin packing), rows to global batches.

Independent of the number of processes, of workers and of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Pack items into bins: longest first, each into the fullest bin with enough room.

    Items of equal length are placed together. Bins are found by the lowest set bit of an integer whose bit *r*
    says that a bin with *r* free tokens exists. A million items take about a second.

    Args:
        lengths: tokens per item, 1 … capacity.
        capacity: tokens per bin.

    Returns:
        Bins of item indices, in the order in which the bins were opened.

    Raises:
        ValueError: an item is longer than ``capacity``, or empty.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.max() > capacity or sizes.min() < 1):
        raise ValueError(f"lengths must be 1 to {capacity}, not {sizes.min()} to {sizes.max()}")
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room left → bins
    open_rooms = 0  # bit r: by_room[r] is not empty
    for length, items in _grouped(sizes):
        position = 0
        while position < len(items):
            fitting = open_rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                index = by_room[room].pop()
                if not by_room[room]:
                    open_rooms &= ~(1 << room)
            else:
                room, index = capacity, len(bins)
                bins.append([])
            # A bin with room for another item of this length is still the fullest such bin.
            placed = items[position : position + room // length]
            position += len(placed)
            bins[index].extend(placed)
            left = room - length * len(placed)
            by_room[left].append(index)
            open_rooms |= 1 << left
    return bins


def _grouped(sizes: np.ndarray) -> list[tuple[int, list[int]]]:
    """(length, indices of items of that length), longest first, indices ascending."""
    order = np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[order])) + 1
    return [(int(sizes[group[0]]), group.tolist()) for group in np.split(order, edges) if len(group)]


MULTIPLE = 8  # tensor cores need sizes that are multiples of 8
# Number of global batches whose samples are sorted by length together, as in transformers' length-grouped sampler.
# More would save little padding and shuffle less.
MEGABATCH = 50
# Minimum number of megabatches per epoch, so that short epochs are shuffled too.
MEGABATCHES = 4


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sample."""

    sample: int
    start: int
    stop: int


Row = tuple[Span, ...]


@dataclass(frozen=True)
class BatchRule:
    """How rows are grouped into global batches. A row is one example; without packing it takes one token row per
    segment, padded to the longest.

    Attributes:
        rows: rows of a full global batch; the last of an epoch may have fewer.
        tokens: padded tokens of a forward pass, instead of ``rows``; without packing only.
        forwards: forward passes per global batch over all processes; used with ``tokens`` only.
        grouped: batch rows of similar length.
        segments: segments per example.
    """

    rows: int
    tokens: int | None = None
    forwards: int = 1
    grouped: bool = False
    segments: int = 1

    def fitting(self, longest: int) -> int:
        """Rows of a global batch whose longest segment has ``longest`` tokens."""
        return self.rows if self.tokens is None else self.forwards * self.rows_of(self.tokens, longest)

    def rows_of(self, tokens: int, longest: int) -> int:
        """Rows that fit into ``tokens`` padded tokens; at least 1."""
        return max(1, tokens // (self.segments * round_up(longest)))


def round_up(length: int) -> int:
    """Round a length up to a multiple of 8: the padded length of a row."""
    return -(-length // MULTIPLE) * MULTIPLE


def epoch_rows(
    lengths: np.ndarray, *, epoch: int, seed: int, packing: bool, capacity: int, split: bool = False
) -> list[Row]:
    """Rows of samples in random order.

    Args:
        lengths: int[N], tokens per sample, at most ``capacity``.
        epoch: 0 for the first; every epoch has another order.
        seed: ``training.seed``.
        packing: pack several samples per row by best-fit-decreasing; otherwise one sample per row.
        capacity: tokens of a row.
        split: with packing, fill rows completely and split samples across rows.

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
    """Global batches of ``size`` rows; the last may be smaller."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def padded_batches(lengths: np.ndarray, rule: BatchRule, *, epoch: int, seed: int) -> list[list[Row]]:
    """Global batches of one sample per row, longest sample first.

    The order inside a global batch affects padding only, since the loss is that of the whole batch. ``rule.grouped``
    sorts samples by length within groups of 50 batches of the epoch's random order, then shuffles the batches of the
    epoch. The batch with the largest forward pass comes first in the first epoch, so out-of-memory errors show early.

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
    """Global batches of one sample per row, longest first: minimal padding, for evaluation."""
    sizes = np.asarray(lengths)
    batches = _cut(np.argsort(-sizes, kind="stable"), sizes, rule)
    return [[(span,) for span in batch] for batch in batches]


def _sorted_in_groups(order: np.ndarray, sizes: np.ndarray, rule: BatchRule) -> np.ndarray:
    """Sort samples by length within each group, in alternating direction, so that batches stay even."""
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
    """Tokens of the largest forward pass, and the longest sample, which is the first in ``batch``."""
    longest = batch[0].stop
    rows = min(len(batch), rule.fitting(longest) if rule.tokens is None else rule.rows_of(rule.tokens, longest))
    return rows * rule.segments * round_up(longest), longest


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
