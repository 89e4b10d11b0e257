"""RWKV-7's generalised delta rule as the recurrence it is, one token at a time: slow, obvious, differentiable.

S_t = diag(exp(w_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t        o_t = scale r_t S_t
"""

from __future__ import annotations

from itertools import pairwise

import torch

from halftune_kernels.ops.rwkv7 import GeneralisedDelta


def rwkv7(call: GeneralisedDelta) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.rwkv7.rwkv7`; computes in fp32, or fp64 where ``v`` is."""
    r, w, k, v, a, b, scale, initial_state, segments, want_final = call
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    r_THK, w_THK, k_THK, v_THV, a_THK, b_THK = (x.to(wide).flatten(0, 1) for x in (r, w, k, v, a, b))
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(segments.bounds)):
        state = r_THK.new_zeros(*r.shape[2:], v.shape[3]) if initial_state is None else initial_state[n].to(wide)
        for t in range(start, end):
            read_HV = torch.einsum("hk,hkv->hv", a_THK[t], state)
            state = w_THK[t].exp()[:, :, None] * state + b_THK[t][:, :, None] * read_HV[:, None]
            state = state + k_THK[t][:, :, None] * v_THV[t][:, None]
            outputs.append(scale * torch.einsum("hk,hkv->hv", r_THK[t], state))
        states.append(state)
    o = torch.stack(outputs) if outputs else v_THV
    return o.view(v.shape).to(v.dtype), torch.stack(states) if want_final else None
