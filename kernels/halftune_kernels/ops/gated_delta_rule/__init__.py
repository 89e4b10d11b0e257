"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo-hybrid)."""

from __future__ import annotations

import torch

from halftune_kernels.arguments import check_scale, without_autocast
from halftune_kernels.dispatch import module
from halftune_kernels.scan.delta_arguments import DeltaRule, check_delta_arguments
from halftune_kernels.scan.recurrent_step import delta_rule_step

__all__ = ["gated_delta_rule", "gated_delta_rule_step"]


@without_autocast
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``S_t = (I - beta_t k_t^T k_t) exp(g_t) S_{t-1} + beta_t k_t^T v_t``, ``o_t = scale q_t S_t``.

    Args:
        q: [B, T, H, K] queries; K and V are 1 to 256.
        k: [B, T, H, K] keys. Of norm 1, or else ``use_qk_l2norm_in_kernel``: with longer keys the rule diverges.
        v: [B, T, HV, V] values; HV is a multiple of H, head h uses keys of head h // (HV / H).
        g: [B, T, HV] log decay, at most 0; fp32 for accuracy.
        beta: [B, T, HV] how much of the old value is replaced, 0 to 1 (to 2 with negative eigenvalues).
        scale: of the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V]; zero if None. N is the number of samples: B, or those of a packed row.
        output_final_state: return the state after each sample's last token, fp32.
        use_qk_l2norm_in_kernel: divide q and k by their norms, √(‖x‖² + 1e-6).
        cu_seqlens: [N + 1] boundaries of the samples in a packed row (B = 1).
        seq_idx: [B, T] sample numbers, in place of ``cu_seqlens``.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        o [B, T, HV, V] in the dtype of ``v``, and the final state [N, HV, K, V] or None.

    Raises:
        ArgumentError: an argument does not fit the others; it is named.
    """
    gates = {"g": (g, "B T HV"), "beta": (beta, "B T HV")}
    segments = check_delta_arguments("gated_delta_rule", q, k, v, gates, initial_state, cu_seqlens, seq_idx)
    scale, normalise = check_scale("gated_delta_rule", scale, keys=q.shape[-1]), use_qk_l2norm_in_kernel
    run = module("gated_delta_rule", q.device, q.dtype, backend).gated_delta_rule
    return run(DeltaRule(q, k, v, g, beta, scale, initial_state, segments, normalise, output_final_state))


@without_autocast
def gated_delta_rule_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:
    """One token of `gated_delta_rule`, for generation; ``state`` is updated in place.

    Args:
        q: [B, H, K] queries.
        k: [B, H, K] keys.
        v: [B, HV, V] values.
        g: [B, HV] log decay.
        beta: [B, HV].
        state: [B, HV, K, V], fp32 or fp64.
        scale: of the output; K ** -0.5 if None.
        use_qk_l2norm_in_kernel: divide q and k by their norms.

    Returns:
        o [B, HV, V] in the dtype of ``v``.

    Raises:
        ArgumentError: an argument does not fit the others; it is named.
    """
    given, normalise = (q, k, v, g, beta), use_qk_l2norm_in_kernel
    return delta_rule_step("gated_delta_rule_step", given, state, scale, per_channel=False, normalise=normalise)
