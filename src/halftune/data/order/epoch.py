"""The order of an epoch: samples to rows, packed or not, and rows to global batches.

Independent of the number of processes, of workers and of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, overload

import numpy as np

from halftune.data.order.packing import best_fit_decreasing, moved

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


Item = TypeVar("Item")


class Lazy(Sequence[Item]):
    """Items that are made when they are asked for. Equal to a sequence with equal items."""

    def _item(self, number: int) -> Item:
        """The item at 0 … N - 1."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[index]
        return self._item(chosen) if isinstance(chosen, int) else [self._item(number) for number in chosen]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class RowOrder(Lazy[Row]):
    """R rows of S spans as flat arrays.

    Attributes:
        samples, starts, stops: int64[S], the fields of each span.
        offsets: int64[R + 1], first span of each row.
    """

    samples: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _item(self, number: int) -> Row:
        part = slice(self.offsets[number], self.offsets[number + 1])
        fields = (array[part].tolist() for array in (self.samples, self.starts, self.stops))
        return tuple(map(Span, *fields))


@dataclass(frozen=True, eq=False)
class BatchOrder(Lazy[list[Row]]):
    """B global batches of rows.

    Attributes:
        rows: all rows, in order.
        edges: int64[B + 1], first row of each batch.
    """

    rows: RowOrder
    edges: np.ndarray

    def __len__(self) -> int:
        return len(self.edges) - 1

    def _item(self, number: int) -> list[Row]:
        return self.rows[int(self.edges[number]) : int(self.edges[number + 1])]


Order = TypeVar("Order", RowOrder, BatchOrder)


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


Length = TypeVar("Length", int, np.ndarray)


def round_up(length: Length) -> Length:
    """Round a length up to a multiple of 8: the padded length of a row."""
    return -(-length // MULTIPLE) * MULTIPLE


def epoch_rows(
    lengths: np.ndarray, *, epoch: int, seed: int, packing: bool, capacity: int, split: bool = False
) -> RowOrder:
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
    sizes = np.asarray(lengths, dtype=np.int64)
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(sizes))
    if not packing:
        return _whole(order, sizes)
    if split:
        return _filled(sizes, order, capacity)
    items, offsets = best_fit_decreasing(sizes[order], capacity)
    places, offsets = moved(offsets, random.permutation(len(offsets) - 1))
    return _whole(order[items[places]], sizes, offsets)


def _whole(order: np.ndarray, sizes: np.ndarray, offsets: np.ndarray | None = None) -> RowOrder:
    """Rows of whole samples; without ``offsets`` one sample per row."""
    return RowOrder(
        order, np.zeros_like(order), sizes[order], np.arange(len(order) + 1) if offsets is None else offsets
    )


def packed_batches(rows: RowOrder, size: int) -> BatchOrder:
    """Global batches of ``size`` rows; the last may be smaller."""
    return BatchOrder(rows, _every(len(rows), size))


def _every(count: int, size: int) -> np.ndarray:
    """int64: the edges of groups of ``size`` of ``count`` elements; the last group may be smaller."""
    return np.append(np.arange(0, count, size, dtype=np.int64), count)


def padded_batches(lengths: np.ndarray, rule: BatchRule, *, epoch: int, seed: int) -> BatchOrder:
    """Global batches of one sample per row, longest sample first.

    The order inside a global batch affects padding only, since the loss is that of the whole batch. ``rule.grouped``
    sorts samples by length within groups of 50 batches of the epoch's random order, then shuffles the batches of the
    epoch. The batch with the largest forward pass comes first in the first epoch, so out-of-memory errors show early.

    Returns:
        Every sample once. A function of the arguments alone.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(sizes))
    if rule.grouped:
        order = _sorted_in_groups(order, sizes, rule)
    edges = _edges(sizes[order], rule)
    if rule.grouped:
        places, edges = moved(edges, random.permutation(len(edges) - 1))
        order = order[places]
    order = order[np.lexsort((-sizes[order], np.repeat(np.arange(len(edges) - 1), np.diff(edges))))]
    if epoch == 0 and len(sizes):
        swapped = np.arange(len(edges) - 1)
        dearest = int(np.argmax(_costs(sizes[order], edges, rule)))
        swapped[[0, dearest]] = dearest, 0
        places, edges = moved(edges, swapped)
        order = order[places]
    return BatchOrder(_whole(order, sizes), edges)


def by_length(lengths: np.ndarray, rule: BatchRule) -> BatchOrder:
    """Global batches of one sample per row, longest first: minimal padding, for evaluation."""
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    return BatchOrder(_whole(order, sizes), _edges(sizes[order], rule))


def _sorted_in_groups(order: np.ndarray, sizes: np.ndarray, rule: BatchRule) -> np.ndarray:
    """Sort samples by length within each group, in alternating direction, so that batches stay even."""
    rows = rule.fitting(int(sizes.mean())) if len(sizes) else 1
    batches = min(MEGABATCH, -(-len(order) // (rows * MEGABATCHES)))
    group = np.arange(len(order)) // (rows * batches)
    downwards = np.where(group % 2, 1, -1) * sizes[order]
    return order[np.lexsort((downwards, group))]


def _edges(sizes: np.ndarray, rule: BatchRule) -> np.ndarray:
    """int64[B + 1]: first sample of each batch, samples in this order."""
    if rule.tokens is None:
        return _every(len(sizes), rule.rows)
    edges, first, longest, most = [0], 0, 0, 0
    for index, size in enumerate(sizes.tolist()):
        if size > longest:
            longest, most = size, rule.fitting(size)
        if index > first and index - first >= most:
            edges.append(index)
            first, longest, most = index, size, rule.fitting(size)
    return np.array([*edges, len(sizes)] if len(sizes) else edges, dtype=np.int64)


def _costs(sizes: np.ndarray, edges: np.ndarray, rule: BatchRule) -> np.ndarray:
    """int64[B]: tokens of each batch's largest forward pass (high 32 bits), and its longest sample (low 32 bits)."""
    longest, rows = sizes[edges[:-1]], np.diff(edges)
    if rule.tokens is not None:
        rows = np.minimum(rows, np.maximum(1, rule.tokens // (rule.segments * round_up(longest))))
    return rows * rule.segments * round_up(longest) << 32 | longest


def padded_tokens(batches: BatchOrder, rows: int, rule: BatchRule) -> int:
    """Tokens of all segments' rows, padding included, in forward passes of ``rows`` rows or ``rule.tokens`` tokens."""
    lengths, counts = batches.rows.stops, np.diff(batches.edges)
    size = np.full(len(counts), rows)
    if rule.tokens is not None:
        size = np.maximum(1, rule.tokens // (rule.segments * round_up(lengths[batches.edges[:-1]])))
    size, left = np.repeat(size, counts), np.repeat(batches.edges[1:], counts) - np.arange(len(lengths))
    first = (np.repeat(counts, counts) - left) % size == 0  # the longest row of a forward pass
    return int((np.minimum(size, left) * round_up(lengths))[first].sum()) * rule.segments


def _filled(sizes: np.ndarray, order: np.ndarray, capacity: int) -> RowOrder:
    """Rows filled completely: the samples behind each other, cut every ``capacity`` tokens."""
    ends = np.cumsum(sizes[order])
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(_every(total, capacity), ends)
    starts = cuts[:-1]
    place = np.searchsorted(ends, starts, side="right")
    samples = order[place]
    first = starts - (ends[place] - sizes[samples])
    offsets = np.searchsorted(starts, _every(total, capacity))
    return RowOrder(samples, first, first + np.diff(cuts), offsets)
