"""Gated RMSNorm with a hand-written backward that keeps only its inputs.

With u the input (times the gate's factor f, if the gate comes first), r = rsqrt(mean(u²) + eps) and n = u r,
y = w n f. From a = dn = dy w f: du = r (a - n mean(a n)); dw = sum(dy n f); df = dy w n, or du x if the gate is first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_BLOCK = 1 << 16  # elements per pass: they stay in the cache


class GatedNorm(NamedTuple):
    """A checked call of `gated_rms_norm`, as every implementation gets it; x and gate are [M, D].

    The fields are arguments of the registered operators.
    """

    x: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor | None
    eps: float
    sigmoid: bool
    norm_before_gate: bool
    group_size: int
    dtype: torch.dtype


def gated_rms_norm(call: GatedNorm) -> torch.Tensor:
    """See `halftune_kernels.ops.gated_rms_norm.gated_rms_norm`; x is [M, D]."""
    return _GatedNorm.apply(*call)  # type: ignore[return-value]


def _factor(gate: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    return torch.sigmoid(gate) if sigmoid else torch.nn.functional.silu(gate)


def _factor_backward(dfactor: torch.Tensor, gate: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    if sigmoid:
        return torch.ops.aten.sigmoid_backward(dfactor, torch.sigmoid(gate))
    return torch.ops.aten.silu_backward(dfactor, gate)


def _norm(u_MGS: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / root mean square, [M, G, 1]."""
    return torch.rsqrt(u_MGS.square().mean(-1, keepdim=True) + eps)


def forward(call: GatedNorm) -> torch.Tensor:
    """The norm [M, D]."""
    x, weight, gate, eps, sigmoid, norm_before_gate, group_size, dtype = call
    wide = torch.promote_types(x.dtype, torch.float32)
    y, w = torch.empty(x.shape, dtype=dtype, device=x.device), weight.to(wide)
    step = max(1, _BLOCK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        u, f = x[rows].to(wide), None if gate is None else _factor(gate[rows].to(wide), sigmoid)
        if f is not None and not norm_before_gate:
            u = u * f
        u_MGS = u.unflatten(1, (-1, group_size))
        out = (u_MGS * _norm(u_MGS, eps)).flatten(1).mul_(w)
        y[rows] = out.mul_(f) if f is not None and norm_before_gate else out
    return y


def backward(dy: torch.Tensor, call: GatedNorm, wants_weight: bool) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, of the weight (None if not wanted) and of the gate (None without one)."""
    x, weight, gate, eps, sigmoid, norm_before_gate, group_size, _ = call
    wide = torch.promote_types(x.dtype, torch.float32)
    w = weight.to(wide)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dweight = torch.zeros_like(w) if wants_weight else None
    step = max(1, _BLOCK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        u, a = x[rows].to(wide), dy[rows].to(wide)
        z = None if gate is None else gate[rows].to(wide)
        f = None if z is None else _factor(z, sigmoid)
        inner = u * f if f is not None and not norm_before_gate else u
        inner_MGS = inner.unflatten(1, (-1, group_size))
        r_MG1 = _norm(inner_MGS, eps)
        n = (inner_MGS * r_MG1).flatten(1)
        dn = a * w
        if f is not None and norm_before_gate and z is not None and dgate is not None:
            dgate[rows] = _factor_backward(dn * n, z, sigmoid)
            dn, a = dn * f, a * f
        if dweight is not None:
            dweight += (a * n).sum(0)
        dn_MGS, n_MGS = dn.unflatten(1, (-1, group_size)), n.unflatten(1, (-1, group_size))
        du = ((dn_MGS - n_MGS * (dn_MGS * n_MGS).mean(-1, keepdim=True)) * r_MG1).flatten(1)
        if f is not None and not norm_before_gate and z is not None and dgate is not None:
            dgate[rows] = _factor_backward(du * u, z, sigmoid)
            du = du * f
        dx[rows] = du
    return dx, None if dweight is None else dweight.to(weight.dtype), dgate


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> torch.Tensor:
        ctx.save_for_backward(*call[:3])
        ctx.options = call[3:]
        return forward(GatedNorm(*call))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = GatedNorm(*ctx.saved_tensors, *ctx.options)
        return *backward(dy, call, ctx.needs_input_grad[1]), *(None for _ in ctx.options)
