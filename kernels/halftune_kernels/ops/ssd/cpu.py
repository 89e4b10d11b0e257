"""Simple decay in chunks with a hand-written backward: plain torch, fast on one thread, also what runs on old GPUs.

A chunk's queries, keys and values meet in matrix products; the state passes from chunk to chunk. Everything inside is
fp32 (fp64 for fp64 input). Heads that share keys share their products. Derivation: with b the inclusive sum of the log
decay inside a chunk, e = exp(b), l = exp(b_C - b), D_ij = exp(b_i - b_j) for i >= j, S the state that enters,

    O = scale [e Q S + (Q K^T * D) V]        S' = exp(b_C) S + (l K)^T V        (Mamba-2, arXiv:2405.21060, section 6)

Shapes: n chunks at one step, C rows of a chunk, G groups of key heads, R value heads per group, K and V head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from halftune_kernels.own_precision import without_autocast
from halftune_kernels.segments import Segments, Step, chunk_steps

CHUNK = 64


def simple_decay(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    scale: float,
    initial_state: torch.Tensor | None,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `halftune_kernels.ops.ssd.simple_decay`."""
    o, state = _SimpleDecay.apply(q, k, v, g, w, initial_state, scale, segments)
    return o, state


@dataclass
class _Chunk:
    """One step's operands, read into the compute dtype."""

    q_nGCK: torch.Tensor
    k_nGCK: torch.Tensor
    v_nGCRV: torch.Tensor  # w * v
    e_nGCR: torch.Tensor
    l_nGCR: torch.Tensor
    d_nGRCC: torch.Tensor
    a_nGCC: torch.Tensor  # Q K^T

    @property
    def decay_nG1R1(self) -> torch.Tensor:
        """exp(b_C): what is left of the entering state."""
        return self.e_nGCR[:, :, -1, None, :, None]


def _rows(x: torch.Tensor, step: Step, groups: int, dtype: torch.dtype, blank: bool = True) -> torch.Tensor:
    """[B, T, H, *] at the rows of a step, as [n, G, C, R, *]; padding is zero if ``blank``."""
    count = len(step.segments)
    taken = x.flatten(0, 1).index_select(0, step.rows).to(dtype)
    taken = taken.view(count, -1, groups, taken.shape[1] // groups, *taken.shape[2:])
    if blank and step.padding is not None:
        taken = taken.masked_fill(step.padding[(...,) + (None,) * (taken.dim() - 2)], 0)
    return taken.transpose(1, 2)


def _read(step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, w: torch.Tensor | None):
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    groups = q.shape[2]
    q_nGCK = _rows(q, step, groups, dtype).squeeze(3).contiguous()
    k_nGCK = _rows(k, step, groups, dtype).squeeze(3).contiguous()
    v_nGCRV = _rows(v, step, groups, dtype)
    if w is not None:
        v_nGCRV = v_nGCRV * _rows(w, step, groups, dtype)[..., None]
    # fp64 costs nothing here, and keeps the digits of a slow decay that follows a fast one
    b_nGCR = _rows(g, step, groups, dtype).double().cumsum(2)
    rows = b_nGCR.shape[2]
    b_nGRC = b_nGCR.transpose(2, 3)
    above = torch.ones(rows, rows, dtype=torch.bool, device=g.device).triu(1)
    d_nGRCC = (b_nGRC[..., :, None] - b_nGRC[..., None, :]).to(dtype).masked_fill_(above, -torch.inf).exp_()
    last = b_nGCR[:, :, -1:]
    return _Chunk(
        q_nGCK,
        k_nGCK,
        v_nGCRV,
        b_nGCR.exp().to(dtype),
        (last - b_nGCR).exp().to(dtype),
        d_nGRCC,
        q_nGCK @ k_nGCK.transpose(2, 3),
    )


def _enter(state: torch.Tensor, step: Step) -> torch.Tensor:
    """The states of a step's segments; all segments are live in most steps."""
    return state if len(step.segments) == len(state) else state.index_select(0, step.segments)


def _leave(state: torch.Tensor, step: Step, new: torch.Tensor) -> torch.Tensor:
    return new if len(step.segments) == len(state) else state.index_copy(0, step.segments, new)


def _put(target: torch.Tensor, step: Step, x_nGCRx: torch.Tensor) -> None:
    """Writes a step's rows into [B, T, H, *], leaving the padding out."""
    rows = x_nGCRx.transpose(1, 2).reshape(-1, *target.shape[2:])
    if step.kept is not None:
        rows = rows.index_select(0, step.kept)
    target.view(-1, *target.shape[2:]).index_copy_(0, step.targets, rows.to(target.dtype))


def _heads(x_nGCRV: torch.Tensor) -> torch.Tensor:
    return x_nGCRV.transpose(2, 3)


class _SimpleDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q, k, v, g, w, initial_state, scale, segments):
        _, _, heads, width = v.shape
        groups, size = q.shape[2:]
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        shape = (segments.count, groups, size, heads // groups, width)
        state = v.new_zeros(shape, dtype=dtype)
        if initial_state is not None:
            state = _to_groups(initial_state.to(dtype), groups)
        states = []
        for step in chunk_steps(segments, CHUNK, v.device):
            chunk, entering = _read(step, q, k, v, g, w), _enter(state, step)
            states.append(entering)
            out_nGCRV = (chunk.q_nGCK @ entering.flatten(3)).view_as(chunk.v_nGCRV).mul_(chunk.e_nGCR[..., None])
            inside_nGRCV = (chunk.a_nGCC[:, :, None] * chunk.d_nGRCC) @ _heads(chunk.v_nGCRV)
            _put(o, step, out_nGCRV.add_(_heads(inside_nGRCV)).mul_(scale))
            added = chunk.k_nGCK.transpose(2, 3) @ (chunk.v_nGCRV * chunk.l_nGCR[..., None]).flatten(3)
            state = _leave(state, step, added.view_as(entering).add_(entering * chunk.decay_nG1R1))
        ctx.save_for_backward(q, k, v, g, w, *states)  # type: ignore[attr-defined]
        ctx.scale, ctx.segments = scale, segments  # type: ignore[attr-defined]
        ctx.state_dtype = None if initial_state is None else initial_state.dtype  # type: ignore[attr-defined]
        return o, state.transpose(2, 3).flatten(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: FunctionCtx, do, dstate):
        q, k, v, g, w, *states = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, segments = ctx.scale, ctx.segments  # type: ignore[attr-defined]
        dq, dk, dv, dg = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g))
        dw = None if w is None else torch.empty_like(w, memory_format=torch.contiguous_format)
        dstate = _to_groups(dstate.to(states[0].dtype) if states else dstate, q.shape[2])
        for step, entering in reversed(list(zip(chunk_steps(segments, CHUNK, v.device), states, strict=True))):
            chunk = _read(step, q, k, v, g, w)
            do_nGCRV = _rows(do, step, q.shape[2], entering.dtype) * scale
            grads, dentering = _chunk_backward(chunk, entering, do_nGCRV, _enter(dstate, step))
            dstate = _leave(dstate, step, dentering)
            dv_nGCRV = grads.pop("v")
            if w is not None and dw is not None:
                _put(dw, step, (dv_nGCRV * _rows(v, step, q.shape[2], entering.dtype)).sum(-1))
                dv_nGCRV = dv_nGCRV * _rows(w, step, q.shape[2], entering.dtype)[..., None]
            _put(dv, step, dv_nGCRV)
            _put(dq, step, grads["q"][:, :, :, None])
            _put(dk, step, grads["k"][:, :, :, None])
            _put(dg, step, grads["g"])
        dinitial = None
        if ctx.state_dtype is not None:  # type: ignore[attr-defined]
            dinitial = dstate.transpose(2, 3).flatten(1, 2).to(ctx.state_dtype)  # type: ignore[attr-defined]
        return dq, dk, dv, dg, dw, dinitial, None, None


def _to_groups(state_NHKV: torch.Tensor, groups: int) -> torch.Tensor:
    """[N, H, K, V] as [N, G, K, R, V]."""
    return state_NHKV.unflatten(1, (groups, -1)).transpose(2, 3).contiguous()


def _chunk_backward(
    chunk: _Chunk, s_nGKRV: torch.Tensor, do_nGCRV: torch.Tensor, ds_nGKRV: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of one chunk; ``do_nGCRV`` carries the scale already. Returns them and the entering state's."""
    e, left = chunk.e_nGCR[..., None], chunk.l_nGCR[..., None]
    doe_nGCX, vl_nGCX = (do_nGCRV * e).flatten(3), (chunk.v_nGCRV * left).flatten(3)
    s_nGKX, ds_nGKX = s_nGKRV.flatten(3), ds_nGKRV.flatten(3)
    do_nGRCV = _heads(do_nGCRV).contiguous()
    dp_nGRCC = (do_nGRCV @ _heads(chunk.v_nGCRV).transpose(3, 4)).mul_(chunk.d_nGRCC)
    sum_nGCC = dp_nGRCC.sum(2)
    dq_nGCK = doe_nGCX @ s_nGKX.transpose(2, 3) + sum_nGCC @ chunk.k_nGCK
    dk_nGCK = vl_nGCX @ ds_nGKX.transpose(2, 3) + sum_nGCC.transpose(2, 3) @ chunk.q_nGCK
    kds_nGCRV = (chunk.k_nGCK @ ds_nGKX).view_as(do_nGCRV)
    qs_nGCX = chunk.q_nGCK @ s_nGKX
    # b enters o through e and D's rows, and the state and D's columns with the other sign.
    # In fp64, where it costs nothing: what rows after a decay add and take cancels, and must cancel exactly.
    into_nGCR = (kds_nGCRV * vl_nGCX.view_as(kds_nGCRV)).sum(-1).double()
    db_nGCR = (qs_nGCX * doe_nGCX).view_as(do_nGCRV).sum(-1) - into_nGCR
    dp_nGRCC.mul_(chunk.a_nGCC[:, :, None])
    dp_nGRCC.diagonal(dim1=-2, dim2=-1).zero_()  # a row with itself does not decay: it would cancel up to rounding
    db_nGCR += (dp_nGRCC.sum(-1, dtype=torch.float64) - dp_nGRCC.sum(-2, dtype=torch.float64)).transpose(2, 3)
    decay = chunk.decay_nG1R1
    db_nGCR[:, :, -1] += (s_nGKRV * ds_nGKRV * decay).sum((2, 4)) + into_nGCR.sum(2)
    p_nGRCC = chunk.a_nGCC[:, :, None] * chunk.d_nGRCC
    dv_nGCRV = _heads(p_nGRCC.transpose(3, 4) @ do_nGRCV) + kds_nGCRV * left
    dg_nGCR = db_nGCR.flip(2).cumsum(2).flip(2).to(do_nGCRV.dtype)
    dentering = (chunk.q_nGCK.transpose(2, 3) @ doe_nGCX).view_as(s_nGKRV) + ds_nGKRV * decay
    return {"q": dq_nGCK, "k": dk_nGCK, "v": dv_nGCRV, "g": dg_nGCR}, dentering
