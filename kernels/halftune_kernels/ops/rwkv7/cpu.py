"""RWKV-7's generalised delta rule in chunks, with a backward pass of its own, in torch.

S_t = diag(exp(w_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t. In a chunk, with c = cumsum(w), e = c - w and A of
`channel_decay` (Peng et al., "RWKV-7 Goose", 2025; the chunked form is that of the DPLR delta rule):

    V' = (I - A(a, b))⁻¹ ((a ∘ exp(e)) S + A(a, k) V)
    O = (r ∘ exp(c)) S + tril(A(r, k)) V + tril(A(r, b)) V'
    S' = exp(c_C) S + (k ∘ exp(c_C - c))ᵀ V + (b ∘ exp(c_C - c))ᵀ V'

Shapes: U units (samples × heads), C rows of a chunk, K, V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halftune_kernels.memory import CUTS
from halftune_kernels.ops.rwkv7 import GeneralisedDelta
from halftune_kernels.scan.channel_decay import ChannelDecay
from halftune_kernels.scan.chunk_scan import Chunks, Plan, Tensors, chunk_scan
from halftune_kernels.scan.triangular import unit_lower_inverse

CUT = CUTS["rwkv7"]


def rwkv7(call: GeneralisedDelta) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.rwkv7.rwkv7`; computes in fp32, or fp64 where ``r`` is."""
    r, w, k, v, a, b, scale, initial_state, segments, want_final = call
    inputs, sizes = [x.flatten(0, 1) for x in (r, w, k, v, a, b)], (k.shape[3], v.shape[3])
    plan = Plan(segments, sizes[1:], v.dtype, sizes, want_final, CUT.chunk, CUT.units, power_of_two=True)
    o, final = chunk_scan(_GeneralisedDelta(scale), inputs, initial_state, plan)
    return o.view(v.shape), final


@dataclass(frozen=True)
class _Prepared:
    """What forward and backward compute from a chunk's inputs alone.

    Attributes:
        rows: [U, 2, C, K] r, scaled, and a.
        columns: [U, 2, C, K] k and b.
        decay: of the chunk; the second row set sees it before its row.
        reading: [U, 2C, K] r and a, decayed from the entering state.
        writing: [U, 2C, K] k and b, decayed to the leaving state.
        weights: [U, C, 2C] what r reads of k and b.
        lower: [U, C, C] A(a, k).
        inverse: [U, C, C].
    """

    rows: torch.Tensor
    columns: torch.Tensor
    decay: ChannelDecay
    reading: torch.Tensor
    writing: torch.Tensor
    weights: torch.Tensor
    lower: torch.Tensor
    inverse: torch.Tensor


@dataclass(frozen=True)
class _GeneralisedDelta:
    """The chunk operator: inputs r, w, k [U, C, K], v [U, C, V], a, b [U, C, K]; states [U, K, V]."""

    scale: float

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        del count  # one at a time
        made, size = self._prepare(inputs), inputs[3].shape[1]
        read = None if state is None else torch.bmm(made.reading, state)
        values = self._values(made, inputs[3], read)
        o = torch.bmm(made.weights, values) if read is None else read[:, :size].baddbmm(made.weights, values)
        return o, made.decay.following(made.writing, values, state, going), ()

    def backward(self, chunks: Chunks) -> tuple[Tensors, torch.Tensor | None]:
        inputs, state, d_out, d_state, _, _ = chunks
        made, size = self._prepare(inputs), inputs[3].shape[1]
        values = self._values(made, inputs[3], None if state is None else torch.bmm(made.reading, state))
        d_values = torch.bmm(made.weights.transpose(1, 2), d_out)
        d_writing, d_last = made.decay.following_backward(made.writing, values, state, d_state, d_values)
        d_right = torch.bmm(made.inverse.transpose(1, 2), d_values[:, size:])
        d_v = d_values[:, :size].baddbmm(made.lower.transpose(1, 2), d_right)

        both = torch.cat((d_out, d_right), 1)
        gradient = torch.bmm(both, values.transpose(1, 2)).view(-1, 2, size, 2, size)
        d_rows, d_columns, d_w = made.decay.products_backward(gradient, made.rows, made.columns)
        d_entering = None
        if state is not None:
            d_reading = torch.bmm(both, state.transpose(1, 2))
            d_rows.addcmul_(d_reading.view_as(d_rows), made.decay.rising)
            # what r reads has decayed up to its row, what a reads before its row
            d_c, d_e = d_reading.mul_(made.reading).view_as(d_rows).unbind(1)
            d_c[:, :-1] += d_e[:, 1:]
            d_w += d_c.flip(1).cumsum(1).flip(1)
            d_entering = made.decay.entering_backward(made.reading, both, d_state)
        d_w += d_last[:, None]
        # what k and b write decays after their row
        d_w[:, 1:] += (d_writing * made.writing).view_as(d_columns).sum(1)[:, :-1].cumsum(1)
        d_columns.add_(d_writing.view_as(d_columns) * made.decay.falling)
        # r reads the state after its own row was written: that row has not decayed
        own = gradient[:, 0].diagonal(dim1=1, dim2=3).transpose(1, 2)[..., None]  # [U, C, 2, 1]
        d_rows[:, 0] += (own * made.columns.transpose(1, 2)).sum(2)
        d_columns += own.transpose(1, 2) * made.rows[:, :1]
        d_r, d_a = d_rows.unbind(1)
        d_k, d_b_rows = d_columns.unbind(1)
        return (d_r * self.scale, d_w, d_k, d_v, d_a, d_b_rows), d_entering

    def _values(self, made: _Prepared, v: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
        """V over V': [U, 2C, V]."""
        size = v.shape[1]
        right = torch.bmm(made.lower, v) if read is None else torch.baddbmm(read[:, size:], made.lower, v)
        return torch.cat((v, torch.bmm(made.inverse, right)), 1)

    def _prepare(self, inputs: Tensors) -> _Prepared:
        r, w, k, _, a, b = inputs
        rows, columns, decay = torch.stack((r * self.scale, a), 1), torch.stack((k, b), 1), ChannelDecay(w, before=True)
        products = decay.products(rows, columns)
        products[:, 0].diagonal(dim1=1, dim2=3).copy_((rows[:, :1] * columns).sum(-1))
        return _Prepared(
            rows=rows,
            columns=columns,
            decay=decay,
            reading=(rows * decay.rising).flatten(1, 2),
            writing=(columns * decay.falling).flatten(1, 2),
            weights=products[:, 0].flatten(2),
            lower=products[:, 1, :, 0].contiguous(),
            inverse=unit_lower_inverse(-products[:, 1, :, 1]),
        )
