"""Gated RMSNorm as its formula, differentiable by autograd."""

from __future__ import annotations

import torch

from halftune_kernels.ops.gated_rms_norm.cpu import GatedNorm


def gated_rms_norm(call: GatedNorm) -> torch.Tensor:
    """See `halftune_kernels.ops.gated_rms_norm.gated_rms_norm`; x is [M, D], fp32 inside (fp64 for fp64)."""
    x, weight, gate, eps, sigmoid, norm_before_gate, group_size, dtype = call
    wide = torch.promote_types(x.dtype, torch.float32)
    u = x.to(wide)
    factor = torch.ones_like(u)
    if gate is not None:
        z = gate.to(wide)
        factor = torch.sigmoid(z) if sigmoid else z * torch.sigmoid(z)
    if not norm_before_gate:
        u = u * factor
    groups = u.unflatten(1, (-1, group_size))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(1) * weight.to(wide)
    return (normed * factor if norm_before_gate else normed).to(dtype)
