"""One token of the delta rule, for generation."""

from __future__ import annotations

import torch

from halftune_kernels.delta_arguments import l2_normalise


def delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    *,
    normalise: bool,
) -> torch.Tensor:
    """``S = exp(g) S; S = S + beta k^T (v - k S); o = scale q S``, in the dtype of ``state``, updated in place.

    Args:
        q: [B, H, K].
        k: [B, H, K].
        v: [B, HV, V].
        g: [B, HV, 1], or [B, HV, K] for a decay per channel.
        beta: [B, HV].
        state: [B, HV, K, V].
        scale: of the output.
        normalise: divide q and k by their norms.

    Returns:
        [B, HV, V] in the dtype of ``v``.
    """
    wide = state.dtype
    q, k = q.to(wide), k.to(wide)
    if normalise:
        q, k = l2_normalise(q)[0], l2_normalise(k)[0]
    repeat = v.shape[1] // q.shape[1]
    q_BH1K, k_BH1K = (x.repeat_interleave(repeat, dim=1)[..., None, :] for x in (q, k))
    state.mul_(g.to(wide).exp()[..., None])
    missing_BH1V = v.to(wide)[..., None, :] - k_BH1K @ state
    state.addcmul_(k_BH1K.transpose(2, 3), missing_BH1V * beta.to(wide)[..., None, None])
    return (scale * (q_BH1K @ state).squeeze(-2)).to(v.dtype)
