"""Weight initialisation of RWKV-7 by layer depth and channel index (Peng et al. 2025, appendix)."""

from __future__ import annotations

import math

import torch
from transformers import initialization as init

from halftune.model.rwkv7.mixing import ChannelMixing, LowRank, TimeMixing


@torch.no_grad()
def init_time_mixing(part: TimeMixing, layers: int) -> None:
    """Initialise a time mixing in a model with ``layers`` layers; its initial output is zero."""
    shape, device = part.shape, part.k_k.device
    depth = part.layer / max(layers - 1, 1)  # 0 … 1
    left = 1 - part.layer / layers  # 1 … nearly 0
    place = torch.arange(shape.hidden, device=device) / shape.hidden
    line = torch.linspace(0, 1, shape.hidden, device=device)
    in_head = torch.linspace(-1, 1, shape.head_dim, device=device).repeat(shape.heads)
    zigzag = in_head * in_head.abs()
    for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
        init.copy_(part.get_parameter(f"x_{name}"), (1 - place.pow(power * left)).expand(1, 1, -1))
    init.constant_(part.k_a, 1.02)
    init.constant_(part.r_k, -0.04)
    init.copy_(part.k_k, 0.71 - 0.1 * (line - 0.5))
    _init_low_rank(part.w_lora, 6 * line.pow(1 + depth**0.3) - 5.5 + 2.5 * zigzag)
    _init_low_rank(part.a_lora, 0.3 * zigzag + 0.4 * (line - 0.5) - 0.19)
    _init_low_rank(part.g_lora, None)
    if part.layer:
        values = torch.linspace(0, 1, shape.value, device=device)
        _init_low_rank(part.v_lora, 0.73 - 0.4 * (values - 0.5))
    init.constant_(part.g_norm.weight, ((part.layer + 1) / layers) ** 0.7)
    init.zeros_(part.g_norm.bias)
    for projection, gain in ((part.r_proj, 1.0), (part.k_proj, 0.1), (part.v_proj, 1.0)):
        init.orthogonal_(projection.weight, gain=gain)
    init.zeros_(part.o_proj.weight)


@torch.no_grad()
def init_channel_mixing(part: ChannelMixing, layers: int) -> None:
    """Initialise a channel mixing in a model with ``layers`` layers; its initial output is zero."""
    place = torch.arange(part.x_k.numel(), device=part.x_k.device) / part.x_k.numel()
    init.copy_(part.x_k, 1 - place.pow((1 - part.layer / layers) ** 4))
    init.orthogonal_(part.key.weight)
    init.zeros_(part.value.weight)


def init_embedding(weight: torch.Tensor) -> None:
    """Initialise the embedding close to zero; the first norm scales it up."""
    init.uniform_(weight, -1e-4, 1e-4)


def init_head(weight: torch.Tensor) -> None:
    """Initialise the output matrix [vocabulary, hidden]."""
    vocabulary, hidden = weight.shape
    init.orthogonal_(weight, gain=0.5 * math.sqrt(max(vocabulary / hidden, 1)))


def _init_low_rank(part: LowRank, bias: torch.Tensor | None) -> None:
    init.zeros_(part.get_parameter("lora.0.weight"))
    up = part.get_parameter("lora.2.weight")
    init.orthogonal_(up, gain=0.1 * math.sqrt(max(up.shape[1] / up.shape[0], 1)))
    if bias is not None:
        init.copy_(part.get_parameter("lora.2.bias"), bias)
