"""The order of an epoch: which samples make which row. The same for every number of processes and workers."""

from __future__ import annotations

import numpy as np

from halftune.data.packing import best_fit_decreasing


class Piece(int):
    """A sample's index that stands for a part of the sample only, tokens ``start`` to ``stop``."""

    start: int
    stop: int

    def __new__(cls, index: int, start: int, stop: int) -> Piece:
        made = super().__new__(cls, index)
        made.start, made.stop = start, stop
        return made

    def __getnewargs__(self) -> tuple[int, int, int]:  # what copying and pickling need
        return int(self), self.start, self.stop


def epoch_rows(
    lengths: np.ndarray, *, epoch: int, seed: int, packing: bool, capacity: int, split: bool = False
) -> list[tuple[int, ...]]:
    """Rows of sample indices in training order.

    Args:
        lengths: int[N], tokens of each sample, at most ``capacity``.
        epoch: 0 for the first; every epoch has another order.
        seed: ``training.seed``.
        packing: put several samples into a row, by best-fit-decreasing; otherwise one sample a row.
        capacity: tokens of a row.
        split: with packing, fill every row to the last token and cut the sample that does not fit; indices of cut
            samples are ``Piece``.

    Returns:
        Every sample once. A function of the arguments alone.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if not packing:
        return [(int(index),) for index in order]
    if split:
        return _filled(np.asarray(lengths), order, capacity)
    bins = best_fit_decreasing(np.asarray(lengths)[order], capacity)
    rows = [tuple(order[packed].tolist()) for packed in bins]
    return [rows[index] for index in random.permutation(len(rows))]


def _filled(lengths: np.ndarray, order: np.ndarray, capacity: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    room = capacity
    for index in order.tolist():
        start, length = 0, int(lengths[index])
        while start < length:
            stop = min(length, start + room)
            row.append(index if (start, stop) == (0, length) else Piece(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                rows.append(tuple(row))
                row, room = [], capacity
    return [*rows, tuple(row)] if row else rows
