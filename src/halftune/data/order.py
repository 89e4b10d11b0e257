"""The order of an epoch: which samples make which row. The same for every number of processes and workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halftune.data.packing import best_fit_decreasing


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` of a sample; a whole sample is the span from 0 to its length."""

    sample: int
    start: int
    stop: int


Row = tuple[Span, ...]


def epoch_rows(
    lengths: np.ndarray, *, epoch: int, seed: int, packing: bool, capacity: int, split: bool = False
) -> list[Row]:
    """Rows of samples in training order.

    Args:
        lengths: int[N], tokens of each sample, at most ``capacity``.
        epoch: 0 for the first; every epoch has another order.
        seed: ``training.seed``.
        packing: put several samples into a row, by best-fit-decreasing; otherwise one sample a row.
        capacity: tokens of a row.
        split: with packing, fill every row to the last token and cut the sample that does not fit.

    Returns:
        Every token of every sample once. A function of the arguments alone.
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
