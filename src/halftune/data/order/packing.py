"""Packing of samples into rows: best-fit-decreasing bin packing. Shuffling, and rows of cut samples: ``epoch``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def best_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins: longest first, each into the fullest bin with enough room.

    Items of equal length are placed together. Bins are found by the lowest set bit of an integer whose bit *r*
    says that a bin with *r* free tokens exists.

    Args:
        lengths: int[N], tokens per item, 1 … capacity.
        capacity: tokens per bin.

    Returns:
        int64[N], the items bin by bin, in the order in which the bins were opened and filled; and int64[B + 1], the
        first item of each bin.

    Raises:
        ValueError: an item is longer than ``capacity``, or empty.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.max() > capacity or sizes.min() < 1):
        raise ValueError(f"lengths must be 1 to {capacity}, not {sizes.min()} to {sizes.max()}")
    values, counts = (array[::-1].tolist() for array in np.unique(sizes, return_counts=True))
    bins, runs = _placed(values, counts, capacity)
    bin_of = np.repeat(np.array(bins, dtype=np.int64), np.array(runs, dtype=np.int64))
    items = np.argsort(-sizes, kind="stable")[np.argsort(bin_of, kind="stable")]
    return items, offsets_of(np.bincount(bin_of))


def _placed(values: Sequence[int], counts: Sequence[int], capacity: int) -> tuple[list[int], list[int]]:
    """The bin of each run of items of equal length, and the number of items in the run.

    Args:
        values, counts: the lengths, descending, and how many items have each.
        capacity: tokens per bin.
    """
    bins, runs, opened = list[int](), list[int](), 0
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room left → bins
    open_rooms = 0  # bit r: by_room[r] is not empty
    for length, waiting in zip(values, counts, strict=True):
        while waiting:
            fitting = open_rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                index = by_room[room].pop()
                if not by_room[room]:
                    open_rooms &= ~(1 << room)
            else:
                room, index, opened = capacity, opened, opened + 1
            # A bin with room for another item of this length is still the fullest such bin.
            placed = min(room // length, waiting)
            waiting -= placed
            bins.append(index)
            runs.append(placed)
            left = room - length * placed
            by_room[left].append(index)
            open_rooms |= 1 << left
    return bins, runs


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64[N + 1]: first element of each of N groups with these counts."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def moved(offsets: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put groups of elements into another order.

    Returns:
        The old index of each element, and the new offsets.
    """
    counts, moved = np.diff(offsets)[order], offsets_of(np.diff(offsets)[order])
    return np.repeat(offsets[:-1][order] - moved[:-1], counts) + np.arange(moved[-1]), moved
