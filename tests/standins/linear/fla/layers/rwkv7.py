"""RWKV-7's time mixer as a layer of the package, in the form that promotes k and a in mixed precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fla.ops.rwkv7 import chunk_rwkv7


class RWKV7Attention(nn.Module):
    """``[B, T, C]`` → ``[B, T, C]``."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.k_k = nn.Parameter(torch.full((hidden_size,), 0.85))
        self.k_a = nn.Parameter(torch.ones(hidden_size))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj, self.a_proj, self.w_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        r, k, v = self.r_proj(x), self.k_proj(x), self.v_proj(x)
        w = -0.6065306597126334 * self.w_proj(x).sigmoid()
        a = self.a_proj(x).sigmoid()
        kk = F.normalize((k * self.k_k).unflatten(-1, (self.heads, -1)), dim=-1)
        k = k.addcmul(k * (a - 1), self.k_a)  # promotes k
        r, w, k, v, a = (y.unflatten(-1, (self.heads, -1)) for y in (r, w, k, v, a))
        out, _ = chunk_rwkv7(r=r, w=w, k=k, v=v, a=-kk, b=kk * a)
        return self.o_proj(out.flatten(2))
