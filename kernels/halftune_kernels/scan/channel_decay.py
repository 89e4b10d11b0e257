"""Products of rows under a decay of its own for each channel, inside one chunk, without a positive exponent.

A_ij = Σ_c x_ic y_jc exp(b_ic - b_jc) for i > j, b the cumulated log decay. exp(b_i) and exp(-b_j) cannot be split over
a whole chunk: the second overflows. So the chunk is halved again and again: rows of a right half meet rows of the left
half in a matrix product, both measured from the middle, where either exponent is a sum of decays. These sums are built
from neighbouring sums, never as differences, and so keep all their digits beside any faster decay.

Shapes: U units, C rows (a power of two), K channels, N row sets, M column sets, S decays of row sets (1: shared).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from halftune_kernels.constants import constant


class _Level(NamedTuple):
    """Factors for halves of size s: rising [U, S, n, s, K] of right halves, falling [U, 1, n, s, K] of left ones."""

    size: int
    rising: torch.Tensor
    falling: torch.Tensor


class ChannelDecay:
    """The decay of a chunk.

    Attributes:
        rising: [U, S, C, K] exp of the decay up to each row, itself included; for the second of two sets excluded.
        falling: [U, 1, C, K] exp of the decay after each row.
        whole: [U, K, 1] exp of the decay of all rows.

    Args:
        g: [U, C, K] log decay, at most 0.
        before: a second row set sees only the decay before its row (RWKV-7 reads its state before it decays).
    """

    def __init__(self, g: torch.Tensor, *, before: bool) -> None:
        units, size, channels = g.shape
        sums = torch.stack((g, torch.zeros_like(g)), 1) if before else g[:, None].clone()
        after, total = torch.zeros_like(g)[:, None], g
        self._levels: list[_Level] = []
        half = 1
        while half < size:
            shape = (units, -1, size // (2 * half), 2, half, channels)
            up, down = sums.view(shape), after.view(shape)
            self._levels.append(_Level(half, up[:, :, :, 1].exp(), down[:, :, :, 0].exp()))
            pairs = total.view(units, -1, 2, channels)
            up[:, :, :, 1] += pairs[:, None, :, 0, None]
            down[:, :, :, 0] += pairs[:, None, :, 1, None]
            total, half = pairs.sum(2), 2 * half
        self.rising, self.falling, self.whole = sums.exp_(), after.exp_(), total.view(units, channels, 1).exp()

    def following(
        self, writing: torch.Tensor, values: torch.Tensor, state: torch.Tensor | None, going: int
    ) -> torch.Tensor | None:
        """The states [going, K, V] after the chunk of the first units, ``writingᵀ values`` added up; None of none."""
        if not going:
            return None
        written = torch.bmm(writing[:going].transpose(1, 2), values[:going])
        return written if state is None else written.addcmul_(state[:going], self.whole[:going])

    def following_backward(
        self,
        writing: torch.Tensor,
        values: torch.Tensor,
        state: torch.Tensor | None,
        d_state: torch.Tensor | None,
        d_values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of ``writing`` and of the whole log decay [U, K], for the states ``writingᵀ values`` added up.

        Args:
            writing: [U, C, K].
            values: [U, C, V]; ``d_values`` is added to.
            state: [U, K, V] before the chunk; None is zeros.
            d_state: [U', K, V] gradient of the states after the chunk, of the first units.
        """
        d_writing, d_whole = torch.zeros_like(writing), writing.new_zeros(writing.shape[0], writing.shape[2])
        if d_state is not None:
            going = len(d_state)
            d_values[:going].baddbmm_(writing[:going], d_state)
            d_writing[:going] = torch.bmm(values[:going], d_state.transpose(1, 2))
            if state is not None:
                d_whole[:going] = (state[:going] * d_state).sum(-1) * self.whole[:going, :, 0]
        return d_writing, d_whole

    def entering_backward(
        self, reading: torch.Tensor, d_read: torch.Tensor, d_state: torch.Tensor | None
    ) -> torch.Tensor:
        """Gradient of the states before the chunk, which it reads and hands on."""
        d_entering = torch.bmm(reading.transpose(1, 2), d_read)
        if d_state is not None:
            d_entering[: len(d_state)].addcmul_(d_state, self.whole[: len(d_state)])
        return d_entering

    def products(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """[U, N, C, M, C] of rows [U, N, C, K] and columns [U, M, C, K], strictly lower in C × C."""
        units, n, size, _ = rows.shape
        out = rows.new_zeros(units, n, size, columns.shape[1], size)
        for level in self._levels:
            right, left = _right(rows, level), _left(columns, level)
            block = torch.bmm(right, left.transpose(1, 2))
            into = _blocks(out, level.size)
            into.copy_(block.view(units, -1, n, level.size, columns.shape[1], level.size).permute(0, 2, 3, 4, 5, 1))
        return out

    def products_backward(
        self, gradient: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of rows, columns and the log decay [U, C, K].

        A row and a column decay by what lies between them: in the right half up to the row, in the left half after the
        column. Their shares are summed over just that; no sum is taken from another, where little would be left of it.
        """
        d_rows, d_columns, d_g = torch.zeros_like(rows), torch.zeros_like(columns), torch.zeros_like(rows[:, 0])
        for level in self._levels:
            right, left = _right(rows, level), _left(columns, level)
            block = _blocks(gradient, level.size).permute(0, 5, 1, 2, 3, 4).reshape(*right.shape[:2], -1)
            d_right, d_left = torch.bmm(block, left), torch.bmm(block.transpose(1, 2), right)
            by_set = d_right.view(_by_block(rows, level.size)).transpose(1, 2)
            _halves(d_rows, level.size)[:, :, :, 1].addcmul_(by_set, level.rising)
            by_set = d_left.view(_by_block(columns, level.size)).transpose(1, 2)
            _halves(d_columns, level.size)[:, :, :, 0].addcmul_(by_set, level.falling)
            from_row = _from_row(level.size, rows.shape[1], level.rising.shape[1], rows.dtype, rows.device)
            after = _after_column(level.size, columns.shape[1], rows.dtype, rows.device)
            into = d_g.view(len(d_g), -1, 2, level.size, d_g.shape[2])
            into[:, :, 1] += torch.matmul(from_row, d_right.mul_(right)).view_as(into[:, :, 1])
            into[:, :, 0] += torch.matmul(after, d_left.mul_(left)).view_as(into[:, :, 0])
        return d_rows, d_columns, d_g


@constant(64)
def _from_row(half: int, sets: int, kinds: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[s, N * s] of ones where a row of a right half has decayed; one of the second kind, before its own row."""
    up_to = torch.ones(half, half, dtype=dtype, device=device).triu()
    return torch.cat([up_to.triu(1) if kinds == 2 and n else up_to for n in range(sets)], 1)


@constant(64)
def _after_column(half: int, sets: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[s, M * s] of ones where a column of a left half has begun to decay."""
    return torch.ones(half, half, dtype=dtype, device=device).tril(-1).repeat(1, sets)


def _halves(sets: torch.Tensor, half: int) -> torch.Tensor:
    """[U, N, n, 2, s, K] view of [U, N, C, K]."""
    return sets.view(*sets.shape[:2], -1, 2, half, sets.shape[3])


def _by_block(sets: torch.Tensor, half: int) -> tuple[int, ...]:
    return (sets.shape[0], sets.shape[2] // (2 * half), sets.shape[1], half, sets.shape[3])


def _right(rows: torch.Tensor, level: _Level) -> torch.Tensor:
    """[U * n, N * s, K] right halves, decayed from the middle."""
    taken = _halves(rows, level.size)[:, :, :, 1] * level.rising
    return taken.transpose(1, 2).reshape(-1, rows.shape[1] * level.size, rows.shape[3])


def _left(columns: torch.Tensor, level: _Level) -> torch.Tensor:
    """[U * n, M * s, K] left halves, decayed to the middle."""
    taken = _halves(columns, level.size)[:, :, :, 0] * level.falling
    return taken.transpose(1, 2).reshape(-1, columns.shape[1] * level.size, columns.shape[3])


def _blocks(matrix: torch.Tensor, half: int) -> torch.Tensor:
    """[U, N, s, M, s, n] view of the blocks (right half, left half) of [U, N, C, M, C]."""
    units, n, size, m, _ = matrix.shape
    count = size // (2 * half)
    split = matrix.view(units, n, count, 2, half, m, count, 2, half)
    return split[:, :, :, 1, :, :, :, 0].diagonal(dim1=2, dim2=5)
