"""RWKV-7 once more, token by token and head by head, from the paper's formulas: what the model is held against.

Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025), equations of sections 4.1 and 4.2, over a
dict of weights with the checkpoint's names. Slow; differentiable; in the dtype of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

Weights = dict[str, torch.Tensor]


def logits_of(weights: Weights, ids: torch.Tensor, *, layers: int, head: int, eps: float, fused: bool) -> torch.Tensor:
    """[T, vocabulary] of one sample ``ids`` [T]; ``eps`` of the norms, ``fused`` the epsilon of normed keys."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)

    x, first = weights["model.embeddings.weight"][ids], None
    for layer in range(layers):
        place = f"model.layers.{layer}"
        if f"{place}.pre_norm.weight" in weights:
            x = norm(x, f"{place}.pre_norm")
        part = {name.removeprefix(f"{place}."): weight for name, weight in weights.items() if name.startswith(place)}
        mixed, first = _time(part, norm(x, f"{place}.attn_norm"), first, head, eps, fused)
        x = x + mixed
        x = x + _channel(part, norm(x, f"{place}.ffn_norm"))
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def _before(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


def _channel(part: Weights, x: torch.Tensor) -> torch.Tensor:
    shifted = x + (_before(x) - x) * part["ffn.x_k"]
    return (shifted @ part["ffn.key.weight"].T).clamp_min(0).pow(2) @ part["ffn.value.weight"].T


def _time(
    part: Weights, x: torch.Tensor, first: torch.Tensor | None, head: int, eps: float, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mixed = {name: x + (_before(x) - x) * part[f"attn.x_{name}"][0, 0] for name in "rwkvag"}

    def low_rank(name: str, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        inner = mixed[name] @ part[f"attn.{name}_lora.lora.0.weight"].T
        inner = inner if between is None else between(inner)
        out = inner @ part[f"attn.{name}_lora.lora.2.weight"].T
        return out + part.get(f"attn.{name}_lora.lora.2.bias", torch.zeros(()))

    r, k, v = (mixed[name] @ part[f"attn.{name}_proj.weight"].T for name in "rkv")
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank("w", torch.tanh)))
    rate, gate = torch.sigmoid(low_rank("a")), low_rank("g", torch.sigmoid)
    own = v
    if first is not None:
        v = v + (first - v) * torch.sigmoid(low_rank("v"))
    removal = k * part["attn.k_k"]
    k = k * (1 + (rate - 1) * part["attn.k_a"])
    heads = []
    for number, r_k in enumerate(part["attn.r_k"]):
        keys, width = slice(number * head, (number + 1) * head), v.shape[1] // len(part["attn.r_k"])
        values = slice(number * width, (number + 1) * width)
        state, out = torch.zeros(width, head, dtype=x.dtype), []
        for t in range(len(x)):
            square = removal[t, keys].square().sum()
            unit = removal[t, keys] / ((square + 1e-6).sqrt() if fused else square.sqrt().clamp_min(1e-12))
            transition = torch.diag(decay[t, keys]) - torch.outer(unit, unit * rate[t, keys])
            state = state @ transition + torch.outer(v[t, values], k[t, keys])
            read = state @ r[t, keys]
            read = (read - read.mean()) / (read.var(unbiased=False) + head * eps).sqrt()
            read = read * part["attn.g_norm.weight"][values] + part["attn.g_norm.bias"][values]
            out.append(read + (r[t, keys] * k[t, keys] * r_k).sum() * v[t, values])
        heads.append(torch.stack(out))
    return (torch.cat(heads, 1) * gate) @ part["attn.o_proj.weight"].T, own if first is None else first
