"""One token of the delta rule, for generation."""

from __future__ import annotations

import torch

from halftune_kernels.arguments import check_scale
from halftune_kernels.scan.delta_arguments import check_step_arguments, l2_normalise

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def delta_rule_step(
    operator: str, given: Tensors, state: torch.Tensor, scale: float | None, *, per_channel: bool, normalise: bool
) -> torch.Tensor:
    """``S = exp(g) S; S = S + beta k^T (v - k S); o = scale q S``, in the dtype of ``state``, updated in place.

    Args:
        operator: name for errors.
        given: q and k [B, H, K], v [B, HV, V], g [B, HV] or [B, HV, K], beta [B, HV].
        state: [B, HV, K, V].
        scale: of the output; K ** -0.5 if None.
        per_channel: whether each channel has its own decay.
        normalise: divide q and k by their norms.

    Returns:
        [B, HV, V] in the dtype of ``v``.

    Raises:
        ArgumentError: an argument does not fit the others; it is named.
    """
    q, k, v, g, beta = given
    gates = {"g": (g, "B HV K" if per_channel else "B HV"), "beta": (beta, "B HV")}
    check_step_arguments(operator, q, k, v, gates, state)
    scale, wide = check_scale(operator, scale, keys=q.shape[-1]), state.dtype
    g = g if per_channel else g[..., None]
    q, k = q.to(wide), k.to(wide)
    if normalise:
        q, k = l2_normalise(q)[0], l2_normalise(k)[0]
    repeat = v.shape[1] // q.shape[1]
    q_BH1K, k_BH1K = (x.repeat_interleave(repeat, dim=1)[..., None, :] for x in (q, k))
    state.mul_(g.to(wide).exp()[..., None])
    missing_BH1V = v.to(wide)[..., None, :] - k_BH1K @ state
    state.addcmul_(k_BH1K.transpose(2, 3), missing_BH1V * beta.to(wide)[..., None, None])
    return (scale * (q_BH1K @ state).squeeze(-2)).to(v.dtype)
