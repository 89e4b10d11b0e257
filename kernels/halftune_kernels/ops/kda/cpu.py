"""Kimi delta attention in chunks, with a backward pass of its own, in torch: fast on a CPU, right on any device.

As the gated delta rule's, but each channel of the state has its own decay (Kimi Team, "Kimi Linear", 2025):

    R = V - (K ∘ exp(b)) S      X = β R      V' = (I + β tril(A(K, K), -1))⁻¹ X
    O = (Q ∘ exp(b)) S + tril(A(Q, K)) V'     S' = exp(b_C) S + (K ∘ exp(b_C - b))ᵀ V'

with A of `channel_decay`. Shapes: U units (samples × heads), C rows of a chunk, K, V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halftune_kernels.memory import CUTS
from halftune_kernels.scan.channel_decay import ChannelDecay
from halftune_kernels.scan.chunk_scan import Chunks, Plan, Tensors, chunk_scan
from halftune_kernels.scan.delta_arguments import DeltaRule, l2_normalise, l2_normalise_backward
from halftune_kernels.scan.triangular import unit_lower_inverse

CUT = CUTS["kda"]


def kda(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.kda.kda`; computes in fp32, or fp64 where ``q`` is."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    repeat = v.shape[2] // q.shape[2]
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2)
    inputs, sizes = [x.flatten(0, 1) for x in (q, k, v, g, beta)], (k.shape[3], v.shape[3])
    plan = Plan(segments, sizes[1:], v.dtype, sizes, want_final, CUT.chunk, CUT.units, power_of_two=True)
    o, final = chunk_scan(_KimiDelta(scale, normalise), inputs, initial_state, plan)
    return o.view(v.shape), final


@dataclass(frozen=True)
class _Prepared:
    """What forward and backward compute from a chunk's inputs alone.

    Attributes:
        rows: [U, 2, C, K] normalised q, scaled, and normalised k.
        inverses: [U, C, 1] of the norms of q and k; empty without normalisation.
        decay: of the chunk.
        reading: [U, 2C, K] q and k, decayed from the entering state.
        writing: [U, C, K] k, decayed to the leaving state.
        weights: [U, C, C] tril(A(Q, K)).
        keys: [U, C, C] tril(A(K, K), -1).
        inverse: [U, C, C].
        beta: [U, C, 1].
    """

    rows: torch.Tensor
    inverses: tuple[torch.Tensor, ...]
    decay: ChannelDecay
    reading: torch.Tensor
    writing: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    inverse: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class _KimiDelta:
    """The chunk operator: inputs q, k [U, C, K], v [U, C, V], g [U, C, K], beta [U, C]; states [U, K, V]."""

    scale: float
    normalise: bool

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        del count  # one at a time
        v = inputs[2]
        made, size = self._prepare(inputs), v.shape[1]
        if state is None:
            values = torch.bmm(made.inverse, v * made.beta)
            o = torch.bmm(made.weights, values)
        else:
            read = torch.bmm(made.reading, state)
            values = torch.bmm(made.inverse, (v - read[:, size:]).mul_(made.beta))
            o = torch.baddbmm(read[:, :size], made.weights, values)
        return o, made.decay.following(made.writing, values, state, going), ()

    def backward(self, chunks: Chunks) -> tuple[Tensors, torch.Tensor | None]:
        inputs, state, d_out, d_state, _, _ = chunks
        v = inputs[2]
        made, size = self._prepare(inputs), v.shape[1]
        missing = v if state is None else v - torch.bmm(made.reading[:, size:], state)
        values = torch.bmm(made.inverse, missing * made.beta)
        d_values = torch.bmm(made.weights.transpose(1, 2), d_out)
        d_writing, d_last = made.decay.following_backward(made.writing, values, state, d_state, d_values)
        d_right = torch.bmm(made.inverse.transpose(1, 2), d_values)
        d_weights = torch.bmm(d_out, values.transpose(1, 2)).tril_()
        d_lower = torch.bmm(d_right, values.transpose(1, 2)).neg_()
        d_beta = (d_right * missing).sum(-1) + (d_lower * made.keys).sum(-1)
        d_lower.mul_(made.beta)

        columns = made.rows[:, 1:]
        gradient = torch.stack((d_weights, d_lower), 1)[:, :, :, None]
        d_rows, d_columns, d_g = made.decay.products_backward(gradient, made.rows, columns)
        d_entering = None
        if state is not None:
            both = torch.cat((d_out, d_right * -made.beta), 1)
            d_reading = torch.bmm(both, state.transpose(1, 2))
            d_rows.addcmul_(d_reading.view_as(d_rows), made.decay.rising)
            # what a row reads has decayed up to it
            d_g += d_reading.mul_(made.reading).view_as(d_rows).sum(1).flip(1).cumsum(1).flip(1)
            d_entering = made.decay.entering_backward(made.reading, both, d_state)
        d_g += d_last[:, None]
        # what a row writes decays in the rows after it
        d_g[:, 1:] += (d_writing * made.writing)[:, :-1].cumsum(1)
        d_columns.add_((d_writing * made.decay.falling[:, 0])[:, None])
        # a row with itself decays by nothing, so the decay has no part in it
        own = d_weights.diagonal(dim1=1, dim2=2)[..., None]
        q, k = made.rows.unbind(1)
        d_q = d_rows[:, 0] + own * k
        d_k = d_rows[:, 1] + d_columns[:, 0] + own * q
        if self.normalise:
            d_q = l2_normalise_backward(d_q, q / self.scale, made.inverses[0])
            d_k = l2_normalise_backward(d_k, k, made.inverses[1])
        return (d_q * self.scale, d_k, d_right * made.beta, d_g, d_beta), d_entering

    def _prepare(self, inputs: Tensors) -> _Prepared:
        q, k, _, g, beta = inputs
        inverses: tuple[torch.Tensor, ...] = ()
        if self.normalise:
            (q, q_inverse), (k, k_inverse) = l2_normalise(q), l2_normalise(k)
            inverses = (q_inverse, k_inverse)
        rows, decay, by_row = torch.stack((q * self.scale, k), 1), ChannelDecay(g, before=False), beta[..., None]
        products = decay.products(rows, rows[:, 1:])
        weights, keys = products[:, 0, :, 0].contiguous(), products[:, 1, :, 0]
        weights.diagonal(dim1=1, dim2=2).copy_((rows[:, 0] * k).sum(-1))
        return _Prepared(
            rows=rows,
            inverses=inverses,
            decay=decay,
            reading=(rows * decay.rising).flatten(1, 2),
            writing=k * decay.falling[:, 0],
            weights=weights,
            keys=keys,
            inverse=unit_lower_inverse(keys * by_row),
            beta=by_row,
        )
