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
from dataclasses import dataclass, fields

import torch

from halftune_kernels.chunk_scan import Tensors, chunk_scan
from halftune_kernels.normalise import EPSILON
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
        factors: [U or 1, 2C, 1] by which q and k were multiplied.
        products: [U, 1, 2C, C] of q and k with k.
        decay: [U, G, C, C] Γ.
        rising, falling: [U, G, C, 1] exp(b) and exp(b_C - b).
        whole: [U, 1, G, 1] exp(b_C).
        weights: [U * G, C, C] Q Kᵀ ∘ Γ.
        inverse: [U * G, C, C] T.
        beta: [U, G, C, 1].
    """

    qk: torch.Tensor
    factors: torch.Tensor
    products: torch.Tensor
    decay: torch.Tensor
    rising: torch.Tensor
    falling: torch.Tensor
    whole: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class _Passed:
    """What a chunk's forward pass comes to with the state that enters.

    Attributes:
        made: from the inputs alone.
        values: [U * G, C, V] V'.
        read: [U, 2C, G, V] Q S over K S; None without a state.
    """

    made: _Prepared
    values: torch.Tensor
    read: torch.Tensor | None

    def tensors(self) -> Tensors:
        """Everything, for `of`."""
        made = [getattr(self.made, field.name) for field in fields(self.made)]
        return [*made, self.values, *(() if self.read is None else (self.read,))]

    @classmethod
    def of(cls, tensors: Tensors) -> _Passed:
        """From what `tensors` gave."""
        count = len(fields(_Prepared))
        read = tensors[count + 1] if len(tensors) > count + 1 else None
        return cls(_Prepared(*tensors[:count]), tensors[count], read)


@dataclass(frozen=True)
class _GatedDeltaRule:
    """The chunk operator: inputs q, k [U, C, K], v [U, C, G, V], g, beta [U, C, G]; states [U, K, G * V]."""

    scale: float
    normalise: bool

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        v = inputs[2]
        passed = self._pass(inputs, state)
        made, size = passed.made, v.shape[1]
        if passed.read is None:
            o = torch.bmm(made.weights, passed.values)
        else:
            o = _by_head(passed.read[:, :size], made.rising)
            o.flatten(0, 1).baddbmm_(made.weights, passed.values)
        following = None
        if going:
            falling = _by_row(passed.values.view((*made.decay.shape[:3], -1))[:going], made.falling[:going])
            following = _decayed(state, made, going)
            keys = made.qk[:going, size:].transpose(1, 2)
            following = torch.bmm(keys, falling) if following is None else following.baddbmm_(keys, falling)
        return o.view(v.shape[0], v.shape[2], size, -1).transpose(1, 2), following, passed.tensors()

    def backward(
        self,
        inputs: Tensors,
        state: torch.Tensor | None,
        d_out: torch.Tensor,
        d_state: torch.Tensor | None,
        kept: Tensors,
    ) -> tuple[Tensors, torch.Tensor | None]:
        v = inputs[2]
        passed = _Passed.of(kept) if kept else self._pass(inputs, state)
        made, (units, size, each, width) = passed.made, v.shape
        missing = v.transpose(1, 2) if passed.read is None else _missing(made, v, passed.read[:, size:])
        d_o = d_out.transpose(1, 2).contiguous().flatten(0, 1)

        # V' is read by the output and by the leaving state
        d_values = torch.bmm(made.weights.transpose(1, 2), d_o)
        # in fp64, where it costs nothing: what rows after a decay add and take cancels, and must cancel exactly
        d_b = d_values.new_zeros(units, each, size, dtype=torch.float64)
        falling = None if d_state is None else _leaving_backward(passed, state, d_state, d_values, d_b)
        d_right = torch.bmm(made.inverse.transpose(1, 2), d_values).view(units, each, size, width)
        d_weights, d_lower, d_beta = _pairs_backward(passed, d_o, d_right, missing, d_b)
        d_qk = torch.bmm(torch.cat((d_weights, d_lower + d_lower.transpose(1, 2)), 1), made.qk[:, size:])
        d_qk[:, size:].baddbmm_(d_weights.transpose(1, 2), made.qk[:, :size])
        if d_state is not None and falling is not None:
            d_qk[: len(d_state), size:].baddbmm_(falling, d_state.transpose(1, 2))
        d_entering = None
        if state is not None:
            d_entering = _entering_backward(passed, state, d_state, (d_o.view_as(d_right), d_right), d_qk, d_b)
        if self.normalise:  # d - x̂ ⟨x̂, d⟩, of unit vectors: those of q are scaled
            along = (made.qk * d_qk).sum(-1, keepdim=True)
            along[:, :size] /= self.scale**2
            d_qk.addcmul_(made.qk, along, value=-1.0)
        d_qk.mul_(made.factors)
        d_g = d_b.flip(-1).cumsum(-1).flip(-1).transpose(1, 2).to(v.dtype)
        d_v = (d_right * made.beta).transpose(1, 2)
        return (d_qk[:, :size], d_qk[:, size:], d_v, d_g, d_beta.transpose(1, 2)), d_entering

    def _pass(self, inputs: Tensors, state: torch.Tensor | None) -> _Passed:
        v = inputs[2]
        made, size = self._prepare(inputs), v.shape[1]
        if state is None:
            return _Passed(made, _solve(made, v.transpose(1, 2) * made.beta), None)
        read = torch.bmm(made.qk, state).unflatten(2, v.shape[2:])
        return _Passed(made, _solve(made, _missing(made, v, read[:, size:]).mul_(made.beta)), read)

    def _prepare(self, inputs: Tensors) -> _Prepared:
        q, k, _, g, beta = inputs
        size = q.shape[1]
        qk = torch.cat((q, k), 1)
        if self.normalise:
            factors = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().add_(EPSILON).rsqrt_()
        else:
            factors = qk.new_ones(1, 2 * size, 1)
        factors[:, :size] *= self.scale
        qk.mul_(factors)
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
            factors=factors,
            products=products,
            decay=decay,
            rising=b.exp().to(q.dtype)[..., None],
            falling=(last - b).exp().to(q.dtype)[..., None],
            whole=last.exp().to(q.dtype)[:, None],
            weights=(products[:, :, :size] * decay).flatten(0, 1),
            inverse=unit_lower_inverse(lower.flatten(0, 1)),
            beta=by_row,
        )


def _leaving_backward(
    passed: _Passed, state: torch.Tensor | None, d_state: torch.Tensor, d_values: torch.Tensor, d_b: torch.Tensor
) -> torch.Tensor:
    """Through S': adds to ``d_values`` [U * G, C, V] and ``d_b`` [U, G, C]; exp(b_C - b) V' as [going, C, G * V]."""
    made, going = passed.made, len(d_state)
    units, each, size = d_b.shape
    falling = _by_row(passed.values.view(units, each, size, -1)[:going], made.falling[:going])
    from_state = torch.bmm(made.qk[:going, size:], d_state)
    some = d_values.view(units, each, size, -1)[:going]
    some.addcmul_(from_state.unflatten(2, (each, -1)).transpose(1, 2), made.falling[:going])
    shares = (from_state * falling).unflatten(2, (each, -1)).sum(-1).transpose(1, 2).double()
    d_b[:going] -= shares
    d_b[:going, :, -1] += shares.sum(-1)
    if state is not None:
        kept = (state[:going] * d_state).unflatten(2, (each, -1)).sum((1, 3))
        d_b[:going, :, -1] += kept * made.whole[:going, 0, :, 0]
    return falling


def _entering_backward(
    passed: _Passed,
    state: torch.Tensor,
    d_state: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor],
    d_qk: torch.Tensor,
    d_b: torch.Tensor,
) -> torch.Tensor:
    """Through exp(b) Q S and exp(b) K S: adds to ``d_qk`` [U, 2C, K] and ``d_b``; the gradient of S, [U, K, G * V].

    ``gradients`` are those of O and of X, [U, G, C, V] each.
    """
    made, (d_o, d_right) = passed.made, gradients
    units, each, size, width = d_o.shape
    assert passed.read is not None
    both = made.qk.new_empty(units, 2, size, each, width)
    torch.mul(d_o.transpose(1, 2), made.rising.transpose(1, 2), out=both[:, 0])
    torch.mul(d_right.transpose(1, 2), (made.rising * made.beta).neg_().transpose(1, 2), out=both[:, 1])
    d_b += (both.view_as(passed.read) * passed.read).view_as(both).sum((1, 4)).transpose(1, 2)
    both = both.view(units, 2 * size, each * width)
    d_qk.baddbmm_(both, state.transpose(1, 2))
    if d_state is None:
        return torch.bmm(made.qk.transpose(1, 2), both)
    going, by_head = len(d_state), d_state.unflatten(2, (each, width))
    if going == units:
        return (by_head * made.whole).flatten(2).baddbmm_(made.qk.transpose(1, 2), both)
    d_entering = torch.bmm(made.qk.transpose(1, 2), both)
    d_entering[:going].unflatten(2, (each, width)).addcmul_(by_head, made.whole[:going])
    return d_entering


def _pairs_backward(
    passed: _Passed, d_o: torch.Tensor, d_right: torch.Tensor, missing: torch.Tensor, d_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q Kᵀ and K Kᵀ, [U, C, C] each, and of beta [U, G, C]; that of b is added to ``d_b``."""
    made, by_column = passed.made, passed.values.transpose(1, 2)
    size = made.qk.shape[1] // 2
    d_weights = torch.bmm(d_o, by_column).view_as(made.decay).mul_(made.decay)
    d_lower = torch.bmm(d_right.flatten(0, 1), by_column).view_as(made.decay).mul_(made.decay)
    d_lower.mul_(_minus_below(size, d_lower.dtype, d_lower.device))
    gated = d_lower * made.products[:, :, size:]
    d_beta = (d_right * missing).sum(-1) + gated.sum(-1)
    d_lower.mul_(made.beta)
    d_pairs = torch.addcmul(gated.mul_(made.beta), d_weights, made.products[:, :, :size]).double()
    # a row with itself does not decay; left in, it would cancel only up to rounding, and drown a small gradient
    d_pairs.diagonal(dim1=-2, dim2=-1).zero_()
    d_b += d_pairs.sum(-1) - d_pairs.sum(-2)
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
