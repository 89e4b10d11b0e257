"""A time mixer in the form of RWKV-7 with its generalised delta rule; trained mixed, its vectors of weights are fp32.

``chunk_rwkv7`` checks its operands as the field's kernel did, and computes the recurrence token by token.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def chunk_rwkv7(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """All ``[B, T, H, D]``; ``w`` is the log decay. S ← S·diag(exp w) + (S·a)ᵀ·b + vᵀ·k; out = S·r."""
    if not r.dtype == k.dtype == v.dtype == a.dtype == b.dtype:
        shown = ", ".join(f"{name}: {x.dtype}" for name, x in (("q", r), ("k", k), ("v", v), ("a", a), ("b", b)))
        raise AssertionError(shown)
    if r.dtype not in (torch.float16, torch.bfloat16):
        raise AssertionError(f"half precision only, got {r.dtype}")
    with torch.autocast(r.device.type, enabled=False):
        state = r.new_zeros(r.shape[0], r.shape[2], r.shape[3], r.shape[3], dtype=torch.float32)
        out = []
        for t in range(r.shape[1]):
            rt, wt, kt, vt, at, bt = (x[:, t].float() for x in (r, w, k, v, a, b))
            read = torch.einsum("bhvk,bhk->bhv", state, at)
            state = state * wt.exp()[:, :, None] + read[..., None] * bt[:, :, None] + vt[..., None] * kt[:, :, None]
            out.append(torch.einsum("bhvk,bhk->bhv", state, rt))
        return torch.stack(out, 1).to(r.dtype)


class TimeMix(nn.Module):
    def __init__(self, hidden: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.k_k = nn.Parameter(torch.full((hidden,), 0.85))
        self.k_a = nn.Parameter(torch.ones(hidden))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj, self.a_proj, self.w_proj = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        r, k, v = self.r_proj(x), self.k_proj(x), self.v_proj(x)
        w = -0.6065306597126334 * self.w_proj(x).sigmoid()
        a = self.a_proj(x).sigmoid()
        kk = F.normalize((k * self.k_k).unflatten(-1, (self.heads, self.size)), dim=-1)
        k = k.addcmul(k * (a - 1), self.k_a)  # promotes k
        r, w, k, v, a = (y.unflatten(-1, (self.heads, self.size)) for y in (r, w, k, v, a))
        return self.o_proj(chunk_rwkv7(r, w, k, v, -kk, kk * a).flatten(2))


class Mixers(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimeMix() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x
