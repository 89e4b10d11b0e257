"""Simple decay as the recurrence it is, one token at a time: slow, obvious, differentiable by autograd.

S_t = exp(g_t) S_{t-1} + k_t^T (w_t v_t)        o_t = scale q_t S_t
"""

from __future__ import annotations

from itertools import pairwise

import torch

from halftune_kernels.ops.ssd.decay import SimpleDecay


def simple_decay(call: SimpleDecay) -> tuple[torch.Tensor, torch.Tensor]:
    """See `halftune_kernels.ops.ssd.simple_decay`; computes in fp32, or fp64 where ``v`` is."""
    q, k, v, g, w, scale, initial_state, segments, output_dtype = call
    batch, length, heads, width = v.shape
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    repeat = heads // q.shape[2]
    q_THK, k_THK = (x.to(wide).flatten(0, 1).repeat_interleave(repeat, dim=1) for x in (q, k))
    v_THV, decay_TH = v.to(wide).flatten(0, 1), g.to(wide).flatten(0, 1).exp()
    if w is not None:
        v_THV = v_THV * w.to(wide).flatten(0, 1)[..., None]
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(segments.bounds)):
        state_HKV = q_THK.new_zeros(heads, q.shape[3], width) if initial_state is None else initial_state[n].to(wide)
        for t in range(start, end):
            state_HKV = decay_TH[t, :, None, None] * state_HKV + k_THK[t, :, :, None] * v_THV[t, :, None, :]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q_THK[t], state_HKV))
        states.append(state_HKV)
    o = torch.stack(outputs) if outputs else v_THV
    return o.view(batch, length, heads, width).to(output_dtype), torch.stack(states)
