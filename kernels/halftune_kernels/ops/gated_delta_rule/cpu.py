"""The gated delta rule in chunks, with a backward pass of its own, in torch: fast on a CPU, right on any device.

One chunk, in row vectors (o = q S); b is the decay cumulated inside the chunk, Γ_ij = exp(b_i - b_j) for i ≥ j else 0,
M = tril(diag(β) K Kᵀ ∘ Γ, -1), T = (I + M)⁻¹ (Yang et al., "Gated Delta Networks", 2024, the UT transform):

    R = V - exp(b) K S      X = β R      V' = T X
    O = exp(b) Q S + (Q Kᵀ ∘ Γ) V'       S' = exp(b_C) S + (exp(b_C - b) K)ᵀ V'

Solving for V' directly needs neither W nor U, and the backward pass is dX = Tᵀ dV', dM = -tril(dX V'ᵀ, -1).

Shapes: U units (samples × key heads), G value heads to a key head, C rows of a chunk, K, V head sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from halftune_kernels.chunk_scan import Tensors, chunk_scan
from halftune_kernels.normalise import l2_normalise, l2_normalise_backward
from halftune_kernels.segments import Segments
from halftune_kernels.triangular import unit_lower_inverse

CHUNK = 64
UNITS = 16  # value heads × samples at once
_LEAST = -1e4  # a decay of exp(-1e4) is 0; smaller ones would only cost digits of the others


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    segments: Segments,
    *,
    normalise: bool,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.gated_delta_rule.gated_delta_rule`; computes in fp32, or fp64 where ``q`` is."""
    (batch, length, heads, width), groups = v.shape, q.shape[2]
    each = heads // groups
    by_group = [x.flatten(0, 1).unflatten(1, (groups, each)) for x in (v, g, beta)]
    inputs = (q.flatten(0, 1), k.flatten(0, 1), *by_group)
    state = None
    if initial_state is not None:  # [N, HV, K, V] -> [N, H, K, G * V]
        state = initial_state.unflatten(1, (groups, each)).transpose(2, 3).flatten(3)
    o, final = chunk_scan(
        _GatedDeltaRule(scale, normalise),
        inputs,
        state,
        ((each, width), v.dtype),
        (q.shape[3], each * width),
        segments,
        chunk=CHUNK,
        units=max(1, UNITS // each),
        want_final=want_final,
    )
    if final is not None:
        final = final.unflatten(3, (each, width)).transpose(2, 3).flatten(1, 2)
    return o.view(batch, length, heads, width), final


@dataclass(frozen=True)
class _Prepared:
    """What forward and backward compute from a chunk's inputs alone.

    Attributes:
        qk: [U, 2C, K] normalised q, scaled, over normalised k.
        inverses: [U, C, 1] of the norms of q and k; empty without normalisation.
        products: [U, 1, 2C, C] of q and k with k.
        decay: [U, G, C, C] Γ.
        rising, falling: [U, G, C, 1] exp(b) and exp(b_C - b).
        whole: [U, 1, G, 1] exp(b_C).
        weights: [U * G, C, C] Q Kᵀ ∘ Γ.
        inverse: [U * G, C, C] T.
        beta: [U, G, C, 1].
    """

    qk: torch.Tensor
    inverses: tuple[torch.Tensor, ...]
    products: torch.Tensor
    decay: torch.Tensor
    rising: torch.Tensor
    falling: torch.Tensor
    whole: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class _GatedDeltaRule:
    """The chunk operator: inputs q, k [U, C, K], v [U, C, G, V], g, beta [U, C, G]; states [U, K, G * V]."""

    scale: float
    normalise: bool

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, _, v, _, _ = inputs
        made = self._prepare(inputs)
        size = v.shape[1]
        if state is None:
            values = _solve(made, v.transpose(1, 2) * made.beta)
            o = torch.bmm(made.weights, values)
        else:
            read = torch.bmm(made.qk, state).unflatten(2, v.shape[2:])
            values = _solve(made, _missing(made, v, read[:, size:]).mul_(made.beta))
            o = _by_head(read[:, :size], made.rising)
            o.flatten(0, 1).baddbmm_(made.weights, values)
        following = None
        if going:
            falling = _by_row(values.view((*made.decay.shape[:3], -1))[:going], made.falling[:going])
            following = _decayed(state, made, going)
            keys = made.qk[:going, size:].transpose(1, 2)
            following = torch.bmm(keys, falling) if following is None else following.baddbmm_(keys, falling)
        return o.view(v.shape[0], v.shape[2], size, -1).transpose(1, 2), following

    def backward(
        self, inputs: Tensors, state: torch.Tensor | None, d_out: torch.Tensor, d_state: torch.Tensor | None
    ) -> tuple[Tensors, torch.Tensor | None]:
        _, _, v, _, _ = inputs
        made = self._prepare(inputs)
        units, size, each, width = v.shape
        going = 0 if d_state is None else len(d_state)
        q, k = made.qk[:, :size], made.qk[:, size:]
        read = None if state is None else torch.bmm(made.qk, state).unflatten(2, (each, width))
        missing = v.transpose(1, 2) if read is None else _missing(made, v, read[:, size:])
        values = _solve(made, missing * made.beta)
        d_o = d_out.transpose(1, 2).contiguous().flatten(0, 1)

        # V' is read by the output and by the leaving state
        d_values = torch.bmm(made.weights.transpose(1, 2), d_o)
        # in fp64, where it costs nothing: what rows after a decay add and take cancels, and must cancel exactly
        d_b = d_values.new_zeros(units, each, size, dtype=torch.float64)
        if d_state is not None:
            falling = _by_row(values.view(units, each, size, width)[:going], made.falling[:going])
            from_state = torch.bmm(k[:going], d_state)
            some = d_values.view(units, each, size, width)[:going]
            some.addcmul_(from_state.unflatten(2, (each, width)).transpose(1, 2), made.falling[:going])
            shares = (from_state * falling).unflatten(2, (each, width)).sum(-1).transpose(1, 2).double()
            d_b[:going] -= shares
            d_b[:going, :, -1] += shares.sum(-1)
            if state is not None:
                kept = (state[:going] * d_state).unflatten(2, (each, width)).sum((1, 3))
                d_b[:going, :, -1] += kept * made.whole[:going, 0, :, 0]

        d_right = torch.bmm(made.inverse.transpose(1, 2), d_values).view(units, each, size, width)
        d_weights, d_lower, d_beta = _pairs_backward(made, d_o, values, d_right, missing, d_b)

        d_entering = None
        pairs = torch.cat((d_weights, d_lower + d_lower.transpose(1, 2)), 1)
        if state is None or read is None:
            d_qk = torch.bmm(pairs, k)
        else:
            both = made.qk.new_empty(units, 2, size, each, width)  # gradients of exp(b) Q S and of exp(b) K S
            torch.mul(d_o.view(units, each, size, width).transpose(1, 2), made.rising.transpose(1, 2), out=both[:, 0])
            torch.mul(d_right.transpose(1, 2), (made.rising * made.beta).neg_().transpose(1, 2), out=both[:, 1])
            both = both.view(units, 2 * size, each * width)
            d_b += (both * read.flatten(2)).view(units, 2, size, each, width).sum((1, 4)).transpose(1, 2)
            d_qk = torch.bmm(both, state.transpose(1, 2)).baddbmm_(pairs, k)
            if d_state is not None and going == units:
                d_entering = (d_state.unflatten(2, (each, width)) * made.whole).flatten(2)
                d_entering.baddbmm_(made.qk.transpose(1, 2), both)
            else:
                d_entering = torch.bmm(made.qk.transpose(1, 2), both)
                if d_state is not None:
                    some = d_entering[:going].unflatten(2, (each, width))
                    some.addcmul_(d_state.unflatten(2, (each, width)), made.whole[:going])
        d_k = torch.baddbmm(d_qk[:, size:], d_weights.transpose(1, 2), q)
        if d_state is not None:
            d_k[:going] += torch.bmm(falling, d_state.transpose(1, 2))
        d_q = d_qk[:, :size]
        if self.normalise:
            d_q = l2_normalise_backward(d_q, q / self.scale, made.inverses[0])
            d_k = l2_normalise_backward(d_k, k, made.inverses[1])
        d_g = d_b.flip(-1).cumsum(-1).flip(-1).transpose(1, 2).to(v.dtype)
        d_v = (d_right * made.beta).transpose(1, 2)
        return (d_q.mul(self.scale), d_k, d_v, d_g, d_beta.transpose(1, 2)), d_entering

    def _prepare(self, inputs: Tensors) -> _Prepared:
        q, k, _, g, beta = inputs
        size = q.shape[1]
        inverses: tuple[torch.Tensor, ...] = ()
        if self.normalise:
            (q, q_inverse), (k, k_inverse) = l2_normalise(q), l2_normalise(k)
            inverses = (q_inverse, k_inverse)
        qk = torch.cat((q * self.scale, k), 1)
        products = torch.bmm(qk, qk[:, size:].transpose(1, 2))[:, None]
        # fp64 costs nothing here, and keeps the digits of a slow decay that follows a fast one
        b = g.transpose(1, 2).double().clamp_(min=_LEAST).cumsum(-1)
        decay = (b[..., :, None] - b[..., None, :]).to(q.dtype)
        decay.add_(_minus_infinity_above(size, q.dtype, q.device)).exp_()
        by_row = beta.transpose(1, 2)[..., None].contiguous()
        lower = (products[:, :, size:] * decay).mul_(by_row)
        last = b[..., -1:]
        return _Prepared(
            qk=qk,
            inverses=inverses,
            products=products,
            decay=decay,
            rising=b.exp().to(q.dtype)[..., None],
            falling=(last - b).exp().to(q.dtype)[..., None],
            whole=last.exp().to(q.dtype)[:, None],
            weights=(products[:, :, :size] * decay).flatten(0, 1),
            inverse=unit_lower_inverse(lower.flatten(0, 1)),
            beta=by_row,
        )


def _pairs_backward(
    made: _Prepared,
    d_o: torch.Tensor,
    values: torch.Tensor,
    d_right: torch.Tensor,
    missing: torch.Tensor,
    d_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q Kᵀ and K Kᵀ, [U, C, C] each, and of beta [U, G, C]; that of b is added to ``d_b``."""
    size = made.qk.shape[1] // 2
    d_weights = torch.bmm(d_o, values.transpose(1, 2)).view_as(made.decay).mul_(made.decay)
    d_lower = torch.bmm(d_right.flatten(0, 1), values.transpose(1, 2)).view_as(made.decay).mul_(made.decay)
    d_lower.mul_(_minus_below(size, d_lower.dtype, d_lower.device))
    gated = d_lower * made.products[:, :, size:]
    d_beta = (d_right * missing).sum(-1) + gated.sum(-1)
    d_lower.mul_(made.beta)
    d_pairs = torch.addcmul(gated.mul_(made.beta), d_weights, made.products[:, :, :size])
    # a row with itself does not decay; left in, it would cancel only up to rounding, and drown a small gradient
    d_pairs.diagonal(dim1=-2, dim2=-1).zero_()
    d_b += d_pairs.sum(-1, dtype=torch.float64) - d_pairs.sum(-2, dtype=torch.float64)
    return d_weights.sum(1), d_lower.sum(1), d_beta


def _solve(made: _Prepared, right: torch.Tensor) -> torch.Tensor:
    """V' = T X: [U * G, C, V] of [U, G, C, V]."""
    return torch.bmm(made.inverse, right.flatten(0, 1))


def _missing(made: _Prepared, v: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """R = V - exp(b) K S: [U, G, C, V] of v and K S [U, C, G, V]."""
    out = v.new_empty(v.shape[0], v.shape[2], v.shape[1], v.shape[3])
    return torch.addcmul(v.transpose(1, 2), read.transpose(1, 2), made.rising, value=-1.0, out=out)


def _by_head(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[U, C, G, V] times [U, G, C, 1] as a new [U, G, C, V]."""
    out = rows.new_empty(rows.shape[0], rows.shape[2], rows.shape[1], rows.shape[3])
    return torch.mul(rows.transpose(1, 2), factor, out=out)


def _by_row(heads: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """[U, G, C, V] times [U, G, C, 1] as a new [U, C, G * V]."""
    units, each, size, width = heads.shape
    out = heads.new_empty(units, size, each, width)
    return torch.mul(heads.transpose(1, 2), factor.transpose(1, 2), out=out).flatten(2)


def _decayed(state: torch.Tensor | None, made: _Prepared, going: int) -> torch.Tensor | None:
    """exp(b_C) S of the units that go on."""
    if state is None:
        return None
    return (state[:going].unflatten(2, (made.whole.shape[2], -1)) * made.whole[:going]).flatten(2)


@functools.lru_cache(maxsize=64)
def _minus_infinity_above(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size, size), float("-inf"), dtype=dtype, device=device).triu_(1)


@functools.lru_cache(maxsize=64)
def _minus_below(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size, size), -1.0, dtype=dtype, device=device).tril_(-1)
