"""The gated delta rule in chunks, with a backward pass of its own, in torch: fast on a CPU, right on any device.

One chunk, in row vectors (o = q S); b is the decay cumulated inside the chunk, Γ_ij = exp(b_i - b_j) for i ≥ j else 0,
M = tril(diag(β) K Kᵀ ∘ Γ, -1), T = (I + M)⁻¹ (Yang et al., "Gated Delta Networks", 2024, the UT transform):

    R = V - exp(b) K S      X = β R      V' = T X
    O = exp(b) Q S + (Q Kᵀ ∘ Γ) V'       S' = exp(b_C) S + (exp(b_C - b) K)ᵀ V'

Solving for V' directly needs neither W nor U, and the backward pass is dX = Tᵀ dV', dM = -tril(dX V'ᵀ, -1).

Shapes: U units (samples × key heads), G value heads to a key head, C rows of a chunk, K, V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from halftune_kernels.constants import constant
from halftune_kernels.memory import CUTS
from halftune_kernels.scan.chunk_scan import Chunks, Tensors
from halftune_kernels.scan.delta_arguments import EPSILON, DeltaRule
from halftune_kernels.scan.triangular import unit_lower_inverse
from halftune_kernels.scan.value_heads import (
    by_row,
    by_value_head,
    decayed,
    head_decay,
    leaving_decay_backward,
    scan_by_key_head,
)

CUT = CUTS["gated_delta_rule"]


def gated_delta_rule(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.gated_delta_rule.gated_delta_rule`; computes in fp32, or fp64 where ``q`` is."""
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    scan, inputs = _GatedDeltaRule(scale, normalise), (q, k, v, g, beta)
    return scan_by_key_head(scan, inputs, initial_state, segments, CUT, v.dtype, want_final)


@dataclass(frozen=True)
class _Prepared:
    """What forward and backward compute from a chunk's inputs alone.

    Attributes:
        qk: [U, 2C, K] normalised q, scaled, over normalised k.
        factors: [U or 1, 2C, 1] by which q and k were multiplied.
        products: [U, 1, 2C, C] of q and k with k.
        between: [U, G, C, C] Γ.
        rising, falling: [U, G, C, 1] exp(b) and exp(b_C - b).
        whole: [U, 1, G, 1] exp(b_C).
        weights: [U * G, C, C] Q Kᵀ ∘ Γ.
        inverse: [U * G, C, C] T.
        beta: [U, G, C, 1].
    """

    qk: torch.Tensor
    factors: torch.Tensor
    products: torch.Tensor
    between: torch.Tensor
    rising: torch.Tensor
    falling: torch.Tensor
    whole: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class _Passed:
    """What the forward pass comes to with the state that enters. F: units that no state enters, those of a first chunk.

    Attributes:
        made: from the inputs alone.
        values: [U * G, C, V] V'.
        read: [U - F, 2C, G * V] Q S over K S.
        states: [U - F, K, G * V] S.
    """

    made: _Prepared
    values: torch.Tensor
    read: torch.Tensor
    states: torch.Tensor

    def tensors(self) -> Tensors:
        """Everything, for `of`."""
        return [*(getattr(self.made, field.name) for field in fields(self.made)), self.values, self.read, self.states]

    @classmethod
    def of(cls, tensors: Tensors) -> _Passed:
        """From what `tensors` gave."""
        return cls(_Prepared(*tensors[:-3]), *tensors[-3:])


@dataclass(frozen=True)
class _GatedDeltaRule:
    """The chunk operator: inputs q, k [U, C, K], v [U, C, G, V], g, beta [U, C, G]; states [U, K, G * V].

    The units of several chunks stand one chunk after the other.
    """

    scale: float
    normalise: bool

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        v = inputs[2]
        passed, following = self._pass(inputs, state, going, count)
        made, size, first = passed.made, v.shape[1], len(v) - len(passed.read)
        o = v.new_empty(v.shape[0], v.shape[2], size, v.shape[3])
        torch.mul(by_value_head(passed.read[:, :size], o), made.rising[first:], out=o[first:])
        split = first * v.shape[2]
        flat = o.flatten(0, 1)
        torch.bmm(made.weights[:split], passed.values[:split], out=flat[:split])
        flat[split:].baddbmm_(made.weights[split:], passed.values[split:])
        return o.transpose(1, 2), following, passed.tensors()

    def backward(self, chunks: Chunks) -> tuple[Tensors, torch.Tensor | None]:
        inputs, state, d_out, d_state, kept, count = chunks
        v = inputs[2]
        passed = _Passed.of(kept) if kept else self._pass(inputs, state, 0, count)[0]
        made, (units, size, each, width) = passed.made, v.shape
        d_o = d_out.transpose(1, 2).contiguous()
        found = _scan_backward(passed, d_o, d_state, count, wanted=state is not None)

        # in fp64, where it costs nothing: what rows after a decay add and take cancels, and must cancel exactly
        d_b = v.new_zeros(units, each, size, dtype=torch.float64)
        missing = v.new_empty(d_o.shape)
        first = units - len(passed.read)
        taken = by_value_head(passed.read[:, size:], d_o)
        torch.addcmul(v[first:].transpose(1, 2), taken, made.rising[first:], value=-1.0, out=missing[first:])
        missing[:first] = v[:first].transpose(1, 2)
        d_weights, d_lower, d_beta = _pairs_backward(passed, d_o.flatten(0, 1), found.right, missing, d_b)
        d_qk = torch.bmm(torch.cat((d_weights, d_lower + d_lower.transpose(1, 2)), 1), made.qk[:, size:])
        d_qk[:, size:].baddbmm_(d_weights.transpose(1, 2), made.qk[:, :size])
        _leaving_backward(passed, found, d_qk, d_b)
        if len(passed.read):
            d_b[first:] += (found.both * passed.read).view(-1, 2, size, each, width).sum((1, 4)).transpose(1, 2)
            d_qk[first:].baddbmm_(found.both, passed.states.transpose(1, 2))
        if self.normalise:  # d - x̂ ⟨x̂, d⟩, of unit vectors: those of q are scaled
            along = (made.qk * d_qk).sum(-1, keepdim=True)
            along[:, :size] /= self.scale**2
            d_qk.addcmul_(made.qk, along, value=-1.0)
        d_qk.mul_(made.factors)
        d_g = d_b.flip(-1).cumsum(-1).flip(-1).transpose(1, 2).to(v.dtype)
        d_v = (found.right * made.beta).transpose(1, 2)
        return (d_qk[:, :size], d_qk[:, size:], d_v, d_g, d_beta.transpose(1, 2)), found.entering

    def _pass(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[_Passed, torch.Tensor | None]:
        """Also the state that leaves, of ``going`` units of the last chunk."""
        v = inputs[2]
        made, (total, size, each, width) = self._prepare(inputs), v.shape
        units, keys = total // count, made.qk.shape[2]
        first = units if state is None else 0
        written = v.new_empty(total, each, size, width)  # beta V
        torch.mul(v.transpose(1, 2), made.beta, out=written)
        taken = (made.rising * made.beta).neg_()
        values = v.new_empty(total * each, size, width)
        read = v.new_empty(total - first, 2 * size, each * width)
        states = v.new_empty(total - first, keys, each * width)
        if state is not None:
            states[:units] = state
        following = None
        for start in range(0, total, units):
            here, entered = slice(start, start + units), slice(start - first, start - first + units)
            right = written[here]
            if start >= first:
                torch.bmm(made.qk[here], states[entered], out=read[entered])
                right.addcmul_(by_value_head(read[entered, size:], right), taken[here])
            heads = slice(start * each, (start + units) * each)
            torch.bmm(made.inverse[heads], right.flatten(0, 1), out=values[heads])
            last = start + units == total
            onward = slice(start, start + (going if last else units))
            if last and not going:
                break
            room = v.new_empty(going, keys, each * width) if last else states[start + units - first :][:units]
            falling = by_row(values.view_as(written)[onward], made.falling[onward])
            chunk_keys = made.qk[onward, size:].transpose(1, 2)
            if start >= first:
                decayed(states[start - first :][: len(room)], made.whole[onward], room)
                room.baddbmm_(chunk_keys, falling)
            else:
                torch.bmm(chunk_keys, falling, out=room)
            following = room
        return _Passed(made, values, read, states), following if going else None

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
        decay = head_decay(g)
        by_row = beta.transpose(1, 2)[..., None].contiguous()
        lower = (products[:, :, size:] * decay.between).mul_(by_row)
        return _Prepared(
            qk=qk,
            factors=factors,
            products=products,
            **decay._asdict(),
            weights=(products[:, :, :size] * decay.between).flatten(0, 1),
            inverse=unit_lower_inverse(lower.flatten(0, 1)),
            beta=by_row,
        )


@dataclass(frozen=True)
class _ScanGradients:
    """What the serial part of the backward pass finds.

    Attributes:
        right: [U, G, C, V] gradient of X.
        both: [U - F, 2C, G * V] gradients of Q S and K S.
        left: [M, K, G * V] gradient of the state that leaves, of the units that one leaves.
        asked: [M, C, G * V] K times ``left``.
        entering: [.., K, G * V] gradient of the state that enters the first chunk; None if there is none.
    """

    right: torch.Tensor
    both: torch.Tensor
    left: torch.Tensor
    asked: torch.Tensor
    entering: torch.Tensor | None


def _scan_backward(
    passed: _Passed, d_o: torch.Tensor, d_state: torch.Tensor | None, count: int, *, wanted: bool
) -> _ScanGradients:
    """Chunk by chunk from the last: gradients of X and of the states, from those of O [U, G, C, V] and of S'."""
    made, (total, each, size, width) = passed.made, d_o.shape
    units, keys, wide = total // count, made.qk.shape[2], each * width
    first = total - len(passed.read)
    d_values = torch.bmm(made.weights.transpose(1, 2), d_o.flatten(0, 1)).view_as(d_o)
    d_right = torch.empty_like(d_values)
    both = d_o.new_empty(total - first, 2, size, each, width)
    torch.mul(d_o[first:].transpose(1, 2), made.rising[first:].transpose(1, 2), out=both[:, 0])
    taken = (made.rising * made.beta).neg_().transpose(1, 2)
    going = 0 if d_state is None else len(d_state)
    left = d_o.new_empty(total - units + going, keys, wide)
    asked = d_o.new_empty(total - units + going, size, wide)
    if d_state is not None:
        left[total - units :] = d_state
    entering = None
    for start in reversed(range(0, total, units)):
        here, onward = slice(start, start + units), slice(start, min(start + units, len(left)))
        if onward.stop > start:
            torch.bmm(made.qk[onward, size:], left[onward], out=asked[onward])
            d_values[onward].addcmul_(by_value_head(asked[onward], d_o), made.falling[onward])
        heads = slice(start * each, (start + units) * each)
        inverse = made.inverse[heads].transpose(1, 2)
        torch.bmm(inverse, d_values[here].flatten(0, 1), out=d_right[here].flatten(0, 1))
        if start < first:
            break
        mine = both[start - first :][:units]
        torch.mul(d_right[here].transpose(1, 2), taken[here], out=mine[:, 1])
        room = left[start - units : start] if start else d_o.new_empty(units, keys, wide)
        decayed(left[onward], made.whole[onward], room[: onward.stop - start])
        room[onward.stop - start :] = 0.0
        room.baddbmm_(made.qk[here].transpose(1, 2), mine.view(units, 2 * size, wide))
        entering = room
    return _ScanGradients(d_right, both.flatten(3).flatten(1, 2), left, asked, entering if wanted else None)


def _leaving_backward(passed: _Passed, found: _ScanGradients, d_qk: torch.Tensor, d_b: torch.Tensor) -> None:
    """Through S': adds to ``d_qk`` [U, 2C, K] and ``d_b`` [U, G, C]."""
    made, led = passed.made, len(found.left)
    units, each, size = d_b.shape
    falling = by_row(passed.values.view(units, each, size, -1)[:led], made.falling[:led])
    leaving_decay_backward(d_b, found.asked * falling, passed.states, found.left, made.whole)
    d_qk[:led, size:].baddbmm_(falling, found.left.transpose(1, 2))


def _pairs_backward(
    passed: _Passed, d_o: torch.Tensor, d_right: torch.Tensor, missing: torch.Tensor, d_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of Q Kᵀ and K Kᵀ, [U, C, C] each, and of beta [U, G, C]; that of b is added to ``d_b``."""
    made, by_column = passed.made, passed.values.transpose(1, 2)
    size = made.qk.shape[1] // 2
    d_weights = torch.bmm(d_o, by_column).view_as(made.between).mul_(made.between)
    d_lower = torch.bmm(d_right.flatten(0, 1), by_column).view_as(made.between).mul_(made.between)
    d_lower.mul_(_minus_below(size, d_lower.dtype, d_lower.device))
    gated = d_lower * made.products[:, :, size:]
    d_beta = (d_right * missing).sum(-1) + gated.sum(-1)
    d_lower.mul_(made.beta)
    d_pairs = torch.addcmul(gated.mul_(made.beta), d_weights, made.products[:, :, :size]).double()
    # a row with itself does not decay; left in, it would cancel only up to rounding, and drown a small gradient
    d_pairs.diagonal(dim1=-2, dim2=-1).zero_()
    d_b += d_pairs.sum(-1) - d_pairs.sum(-2)
    return d_weights.sum(1), d_lower.sum(1), d_beta


@constant(64)
def _minus_below(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size, size), -1.0, dtype=dtype, device=device).tril_(-1)
