"""Best-fit-decreasing bin packing of samples into rows of fixed capacity."""

from __future__ import annotations

from collections.abc import Sequence

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
