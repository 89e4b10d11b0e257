"""Causal attention within segments as one autograd function, in blocks of queries that stay in the cache.

Shapes: H query heads, G key/value heads, R = H / G, T tokens of the row, L of a segment, D head size, n queries of a
block. A block multiplies with the keys up to its own end, so that half of the square is never computed; the query heads
that share keys are rows of one product. Kept for the backward pass: the inputs; probabilities are computed again. All
arithmetic is fp32 (fp64 for fp64), whatever the inputs are: at these sizes half formats gain nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.constants import constant

_BLOCK = 64  # queries; larger blocks compute more of what the mask throws away
_softmax = torch.ops.aten._softmax.out
_softmax_backward = torch.ops.aten._softmax_backward_data.out


def causal_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """``softmax(scale · Q Kᵀ, causal) V`` for each segment alone.

    Args:
        query: ``[H, T, D]``, a floating dtype.
        key, value: ``[G, T, D]``, H a multiple of G.
        lengths: tokens of the segments; their sum is T.
        scale: of the scores.

    Returns:
        ``[T, H, D]``, contiguous, in the dtype of ``query``.
    """
    assert sum(lengths) == query.shape[1] == key.shape[1], "the segments do not cover the row"
    out = _CausalSegments.apply(query, key, value, tuple(lengths), scale)
    assert isinstance(out, torch.Tensor)
    return out


class _Row:
    """The operands of a row, and scratch for the scores of a block."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, lengths: tuple[int, ...], scale: float) -> None:
        self.heads, _, self.size = query.shape
        self.groups, self.scale, self.lengths = key.shape[0], scale, lengths
        self.wide = torch.promote_types(query.dtype, torch.float32)
        most = self.heads * min(_BLOCK, max(lengths)) * max(lengths)
        self.scratch = torch.empty(3, most, dtype=self.wide, device=query.device)

    def segments(self) -> Iterator[slice]:
        """Places of the segments in the row."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    def rows(self, heads: torch.Tensor) -> torch.Tensor:
        """``[H, n, D]`` as ``[G, R · n, D]``, contiguous."""
        return heads.to(self.wide).reshape(self.groups, -1, self.size)

    def room(self, index: int, rows: int, keys: int) -> torch.Tensor:
        """Uninitialised ``[G, rows, keys]``."""
        return self.scratch[index, : self.groups * rows * keys].view(self.groups, rows, keys)

    def probabilities(self, rows: torch.Tensor, keys: torch.Tensor, size: int) -> torch.Tensor:
        """Of a block of ``size`` queries over ``keys`` ``[G, end, D]``, the last ``size`` of which are its own."""
        scores, out = (self.room(index, rows.shape[1], keys.shape[1]) for index in (0, 1))
        torch.baddbmm(scores, rows, keys.transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        scores.view(self.groups, -1, size, keys.shape[1])[..., -size:].add_(_later(size, self.wide, rows.device))
        return _softmax(scores, -1, False, out=out)


class _CausalSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any, scale: Any) -> Any:
        row = _Row(query, key, lengths, scale)
        heads, tokens, size = query.shape
        out = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
        for segment in row.segments():
            k, v = key[:, segment].to(row.wide), value[:, segment].to(row.wide)
            for start in range(0, k.shape[1], _BLOCK):
                end = min(start + _BLOCK, k.shape[1])
                place = slice(segment.start + start, segment.start + end)
                chances = row.probabilities(row.rows(query[:, place]), k[:, :end], end - start)
                out[place] = torch.bmm(chances, v[:, :end]).view(heads, -1, size).transpose(0, 1)
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        row = _Row(query, key, ctx.lengths, ctx.scale)
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for segment in row.segments():
            k, v = key[:, segment].to(row.wide), value[:, segment].to(row.wide)
            sum_k, sum_v = (torch.zeros(k.shape, dtype=row.wide, device=k.device) for _ in range(2))
            for start in range(0, k.shape[1], _BLOCK):
                end = min(start + _BLOCK, k.shape[1])
                place = slice(segment.start + start, segment.start + end)
                q, g = row.rows(query[:, place]), row.rows(grad[place].transpose(0, 1))
                chances = row.probabilities(q, k[:, :end], end - start)
                by_chance = torch.bmm(g, v[:, :end].transpose(1, 2), out=row.room(0, q.shape[1], end))
                scores = _softmax_backward(by_chance, chances, -1, row.wide, grad_input=row.room(2, q.shape[1], end))
                grad_query[:, place] = torch.bmm(scores, k[:, :end]).mul_(row.scale).view(row.heads, -1, row.size)
                sum_k[:, :end].baddbmm_(scores.transpose(1, 2), q)
                sum_v[:, :end].baddbmm_(chances.transpose(1, 2), g)
            grad_key[:, segment] = sum_k.mul_(row.scale)
            grad_value[:, segment] = sum_v
        return grad_query, grad_key, grad_value, None, None


@constant(2 * _BLOCK)
def _later(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[size, size]``: -∞ where a key comes after the query, else 0."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu_(1)
