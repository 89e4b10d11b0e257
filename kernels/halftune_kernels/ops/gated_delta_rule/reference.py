"""The gated delta rule as the recurrence it is, one token at a time: slow, obvious, differentiable by autograd.

S_t = (I - beta_t k_t^T k_t) exp(g_t) S_{t-1} + beta_t k_t^T v_t        o_t = scale q_t S_t
"""

from __future__ import annotations

from itertools import pairwise

import torch

from halftune_kernels.scan.delta_arguments import EPSILON, DeltaRule


def gated_delta_rule(call: DeltaRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `halftune_kernels.ops.gated_delta_rule.gated_delta_rule`; fp32, or fp64 where ``v`` is.

    ``g`` is [B, T, HV], or [B, T, HV, K] for a decay of its own for each channel (Kimi delta attention).
    """
    q, k, v, g, beta, scale, initial_state, segments, normalise, want_final = call
    batch, length, heads, width = v.shape
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    q_THK, k_THK = (x.to(wide).flatten(0, 1) for x in (q, k))
    if normalise:
        q_THK, k_THK = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q_THK, k_THK))
    q_THK, k_THK = (x.repeat_interleave(heads // q.shape[2], dim=1) for x in (q_THK, k_THK))
    v_THV, beta_TH1 = v.to(wide).flatten(0, 1), beta.to(wide).flatten(0, 1)[..., None]
    decay_THKV = g.to(wide).flatten(0, 1).exp().reshape(batch * length, heads, -1, 1)  # one or K rows, one column
    outputs, states = [], []
    for n, (start, end) in enumerate(pairwise(segments.bounds)):
        state_HKV = q_THK.new_zeros(heads, q.shape[3], width) if initial_state is None else initial_state[n].to(wide)
        for t in range(start, end):
            state_HKV = decay_THKV[t] * state_HKV
            known_HV = torch.einsum("hk,hkv->hv", k_THK[t], state_HKV)
            state_HKV = state_HKV + k_THK[t][:, :, None] * (beta_TH1[t] * (v_THV[t] - known_HV))[:, None, :]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q_THK[t], state_HKV))
        states.append(state_HKV)
    o = torch.stack(outputs) if outputs else v_THV
    return o.view(batch, length, heads, width).to(v.dtype), torch.stack(states) if want_final else None
