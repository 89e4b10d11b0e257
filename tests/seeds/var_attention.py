"""Attention as Visual AutoRegressive models write it: cosine attention with a learned fp32 scale, a key cache by hand.

Written from the description of the failure: under CUDA's autocast normalisation returns fp32, and so does the
product with an fp32 scale; the cache keeps what it was given.
"""

from __future__ import annotations

import math

import torch
from flash_attn import flash_attn_func
from torch import nn
from torch.nn import functional as F


class CosineAttention(nn.Module):
    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.scale_mul = nn.Parameter(torch.full((1, 1, heads, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden)
        self.cached_k: torch.Tensor | None = None
        self.cached_v: torch.Tensor | None = None
        self.caching = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mat_qkv(x).unflatten(-1, (3, self.heads, self.size)).unbind(2)
        scale = self.scale_mul.clamp_max(math.log(100.0)).exp()
        q = F.normalize(q, dim=-1).mul(scale)  # promotes q
        k = F.normalize(k, dim=-1)  # promotes k
        if self.caching:
            k = k if self.cached_k is None else torch.cat((self.cached_k, k), 1)
            v = v if self.cached_v is None else torch.cat((self.cached_v, v), 1)
            self.cached_k, self.cached_v = k, v
        out = flash_attn_func(q, k, v, softmax_scale=1.0)
        return self.proj(out.flatten(2))


class Blocks(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CosineAttention() for _ in range(layers))
        self.head = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (32,)))
        return self.head(x)
