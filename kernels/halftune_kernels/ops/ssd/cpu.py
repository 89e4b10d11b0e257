"""Simple decay in chunks with a hand-written backward: plain torch, fast on a CPU, also what runs on old GPUs.

With b the inclusive sum of the log decay inside a chunk, e = exp(b), l = exp(b_C - b), D_ij = exp(b_i - b_j) for
i >= j, S the state that enters, and v weighted already,

    O = scale [e Q S + (Q K^T * D) V]        S' = exp(b_C) S + (l K)^T V        (Mamba-2, arXiv:2405.21060, section 6)

What a chunk adds to the state depends on no state, so only S' goes from chunk to chunk: all products of several
chunks are done at once. Heads that share keys share their products.

Shapes: U units (samples x groups of key heads, one chunk after the other), C rows of a chunk, R value heads per group,
K and V head sizes, F units of a first chunk that no state enters.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from halftune_kernels.memory import CUTS
from halftune_kernels.ops.ssd.decay import SimpleDecay
from halftune_kernels.scan.chunk_scan import Chunks, Tensors
from halftune_kernels.scan.value_heads import (
    add_decayed,
    by_row,
    by_value_head,
    head_decay,
    leaving_decay_backward,
    scan_by_key_head,
)

CUT = CUTS["ssd"]


def simple_decay(call: SimpleDecay) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.ssd.simple_decay`."""
    q, k, v, g, w, scale, initial_state, segments, output_dtype = call
    inputs = (q, k, v, g) if w is None else (q, k, v, g, w)
    o, final = scan_by_key_head(
        _SimpleDecay(scale), inputs, initial_state, segments, CUT, output_dtype, want_final=True
    )
    assert final is not None
    return o, final


@dataclass(frozen=True)
class _Passed:
    """What the forward pass comes to.

    Attributes:
        qk: [U, 2C, K] q over k.
        values: [U, R, C, V] weighted.
        between: [U, R, C, C] D.
        rising, falling: [U, R, C, 1] e and l.
        whole: [U, 1, R, 1] exp(b_C).
        products: [U, 1, C, C] Q K^T.
        states: [U - F, K, R * V] S.
    """

    qk: torch.Tensor
    values: torch.Tensor
    between: torch.Tensor
    rising: torch.Tensor
    falling: torch.Tensor
    whole: torch.Tensor
    products: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True)
class _SimpleDecay:
    """The chunk operator: inputs q, k [U, C, K], v [U, C, R, V], g and perhaps w [U, C, R]; states [U, K, R * V]."""

    scale: float

    def forward(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Tensors]:
        passed, following = self._pass(inputs, state, going, count)
        values, first, size = passed.values, len(passed.values) - len(passed.states), passed.values.shape[2]
        o = torch.matmul(passed.products * passed.between, values)
        if len(passed.states):
            read = torch.bmm(passed.qk[first:, :size], passed.states)
            o[first:].addcmul_(by_value_head(read, values), passed.rising[first:])
        kept = [getattr(passed, field.name) for field in fields(passed)]
        return o.mul_(self.scale).transpose(1, 2), following, kept

    def backward(self, chunks: Chunks) -> tuple[Tensors, torch.Tensor | None]:
        inputs, state, d_out, d_state, kept, count = chunks
        passed = _Passed(*kept) if kept else self._pass(inputs, state, 0, count)[0]
        units, each, size, _ = passed.values.shape
        first, qk = units - len(passed.states), passed.qk
        d_o = torch.mul(d_out.transpose(1, 2), self.scale, out=torch.empty_like(passed.values))
        d_read = by_row(d_o[first:], passed.rising[first:])
        left, d_entering = _states_backward(passed, d_read, d_state, count)
        led = len(left)

        d_pairs = torch.matmul(d_o, passed.values.transpose(2, 3)).mul_(passed.between)
        d_products = d_pairs.sum(1)
        d_qk = torch.cat((torch.bmm(d_products, qk[:, size:]), torch.bmm(d_products.transpose(1, 2), qk[:, :size])), 1)
        written = by_row(passed.values[:led], passed.falling[:led])
        d_qk[:led, size:].baddbmm_(written, left.transpose(1, 2))
        asked = torch.bmm(qk[:led, size:], left)
        d_values = torch.matmul((passed.products * passed.between).transpose(2, 3), d_o)
        d_values[:led].addcmul_(by_value_head(asked, d_values), passed.falling[:led])

        # b enters o through e and D's rows, and the state and D's columns with the other sign.
        # In fp64, where it costs nothing: what rows after a decay add and take cancels, and must cancel exactly.
        d_pairs.mul_(passed.products)
        d_pairs.diagonal(dim1=-2, dim2=-1).zero_()  # a row with itself does not decay: it would cancel up to rounding
        d_b = d_pairs.sum(-1, dtype=torch.float64) - d_pairs.sum(-2, dtype=torch.float64)
        leaving_decay_backward(d_b, asked.mul_(written), passed.states, left, passed.whole)
        if len(passed.states):
            d_qk[first:, :size].baddbmm_(d_read, passed.states.transpose(1, 2))
            read = torch.bmm(qk[first:, :size], passed.states).mul_(d_read)
            d_b[first:] += read.unflatten(2, (each, -1)).sum(-1).transpose(1, 2)
        d_g = d_b.flip(-1).cumsum(-1).flip(-1).transpose(1, 2).to(d_o.dtype)
        d_v, d_w = d_values.transpose(1, 2), ()
        if len(inputs) == 5:
            d_v, d_w = d_v * inputs[4][..., None], ((d_v * inputs[2]).sum(-1),)
        return (d_qk[:, :size], d_qk[:, size:], d_v, d_g, *d_w), d_entering if state is not None else None

    def _pass(
        self, inputs: Tensors, state: torch.Tensor | None, going: int, count: int
    ) -> tuple[_Passed, torch.Tensor | None]:
        """Also the state that leaves, of ``going`` units of the last chunk."""
        q, k, v, g, *weight = inputs
        (total, size, each, width), keys = v.shape, k.shape[2]
        units = total // count
        first = units if state is None else 0
        values = v.new_empty(total, each, size, width)
        if weight:
            torch.mul(v.transpose(1, 2), weight[0].transpose(1, 2)[..., None], out=values)
        else:
            values.copy_(v.transpose(1, 2))
        qk = torch.cat((q, k), 1)
        passed = _Passed(
            qk=qk,
            values=values,
            **head_decay(g)._asdict(),
            products=torch.bmm(qk[:, :size], qk[:, size:].transpose(1, 2))[:, None],
            states=v.new_empty(total - first, keys, each * width),
        )
        if state is not None:
            passed.states[:units] = state
        led = total - units + going  # units that a state leaves; all but the last enter the next chunk
        added = v.new_empty(led, keys, each * width)
        torch.bmm(qk[:led, size:].transpose(1, 2), by_row(values[:led], passed.falling[:led]), out=added)
        for start in range(0, led, units):
            leaving = added[start : start + units]
            if start >= first:
                entered = passed.states[start - first :][: len(leaving)]
                add_decayed(leaving, entered, passed.whole[start:][: len(leaving)])
            if start + units < total:
                passed.states[start + units - first :][:units] = leaving
        return passed, added[total - units :] if going else None


def _states_backward(
    passed: _Passed, d_read: torch.Tensor, d_state: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the states that leave [.., K, R * V], of all units that one leaves, and of that which enters."""
    total = len(passed.qk)
    units, size = total // count, passed.qk.shape[1] // 2
    first = total - len(passed.states)
    found = torch.bmm(passed.qk[first:, :size].transpose(1, 2), d_read)  # of the states that enter
    # those of a chunk leave the one before
    for start in reversed(range(first, total, units)):
        left = d_state if start + units == total else found[start + units - first :][:units]
        if left is not None:
            add_decayed(found[start - first :][: len(left)], left, passed.whole[start:][: len(left)])
    inner = found if first else found[units:]
    return inner if d_state is None else torch.cat((inner, d_state)), None if first else found[:units]
