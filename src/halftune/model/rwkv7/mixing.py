"""The two parts of an RWKV-7 layer: time mixing, with a recurrent state, and channel mixing.

Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025), section 4, in the parametrisation and with
the parameter names of flash-linear-attention's checkpoints. Parameters may be fp32 with half activations: arithmetic
with them is in fp32, and matmuls and the operator get the dtype of the activations.

Shapes: B batch, T tokens, D hidden, H heads, K and V widths of a head of keys and values.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from halftune.config.facts.rwkv7_shape import Rwkv7Shape
from halftune.core.errors import ModelError
from halftune.model.rwkv7.row_context import CHANNEL, TIME, RowContext
from halftune_kernels.ops.rwkv7 import rwkv7, rwkv7_step

SLOWEST_DECAY = -math.exp(-0.5)  # times a sigmoid: the log of a decay
_KEY_EPSILON = 1e-6  # added to the squared norm of keys, in checkpoints with fused norms; else the norm is clamped
_SMALLEST_NORM = 1e-12  # of torch's F.normalize


def wide(x: torch.Tensor) -> torch.Tensor:
    """Cast to fp32; fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class WideBias(nn.Linear):
    """A linear layer with the product in its input's dtype and the bias added in fp32; returns fp32.

    The biases, such as the decay's base, are far larger than the product: half precision would round it away.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., n_in] to [..., n_out] in fp32 or fp64."""
        return wide(F.linear(input, self.weight)) + wide(self.bias)


class LowRank(nn.Module):
    """``up(act(down(x)))``; the names of its weights are the format's: ``lora.0`` and ``lora.2``."""

    def __init__(self, n_in: int, rank: int, n_out: int, act: nn.Module, *, bias: bool = True) -> None:
        super().__init__()
        up = WideBias(rank, n_out) if bias else nn.Linear(rank, n_out, bias=False)
        self.lora = nn.Sequential(nn.Linear(n_in, rank, bias=False), act, up)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, n_in] to [B, T, n_out]; in fp32 where there is a bias."""
        return self.lora(x_BTD)


class TimeMixing(nn.Module):
    """RWKV-7's time mixing.

    Args:
        shape: the sizes.
        layer: layer index; the first layer's values are mixed into those of all others.
        norm_eps: epsilon of the norm over heads, before multiplication with the head width.
        fused_norm: selects the epsilon of the key norm.
    """

    def __init__(self, shape: Rwkv7Shape, layer: int, *, norm_eps: float, fused_norm: bool) -> None:
        super().__init__()
        self.shape, self.layer, self.fused_norm = shape, layer, fused_norm
        hidden, value = shape.hidden, shape.value
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.zeros(1, 1, hidden)))
        self.k_k, self.k_a = (nn.Parameter(torch.zeros(hidden)) for _ in range(2))
        self.r_k = nn.Parameter(torch.zeros(shape.heads, shape.head_dim))
        self.r_proj, self.k_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.v_proj, self.o_proj = nn.Linear(hidden, value, bias=False), nn.Linear(value, hidden, bias=False)
        self.w_lora = LowRank(hidden, shape.decay_rank, hidden, nn.Tanh())
        if layer:
            self.v_lora = LowRank(hidden, shape.v_rank, value, nn.Identity())
        self.a_lora = LowRank(hidden, shape.a_rank, hidden, nn.Identity())
        self.g_lora = LowRank(hidden, shape.gate_rank, value, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(shape.heads, value, eps=shape.head_dim * norm_eps)

    def forward(
        self, x_BTD: torch.Tensor, first_BTE: torch.Tensor | None, row: RowContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes along time.

        Args:
            x_BTD: normalised input.
            first_BTE: the first layer's values, heads concatenated; None in the first layer.
            row: context of the batch.

        Returns:
            [B, T, D], and the first layer's values.
        """
        x_BTD = row.without_padding(x_BTD)
        before_BTD = row.previous(x_BTD, self.layer, TIME)
        r, w, k, v, a, g = (_shifted(x_BTD, before_BTD, getattr(self, f"x_{name}")) for name in "rwkvag")
        w_BTD, a_BTD, g_BTE = SLOWEST_DECAY * self.w_lora(w).sigmoid(), self.a_lora(a).sigmoid(), self.g_lora(g)
        r_BTD, k_BTD, v_BTE = self.r_proj(r), self.k_proj(k), self.v_proj(v)
        own_BTE = v_BTE
        if first_BTE is not None:
            v_BTE = torch.lerp(wide(own_BTE), wide(first_BTE), self.v_lora(v).sigmoid()).to(own_BTE.dtype)
        erased_BTHK = self._unit(wide(k_BTD) * wide(self.k_k))
        k_BTD = (wide(k_BTD) * (1 + (a_BTD - 1) * wide(self.k_a))).to(k_BTD.dtype)
        r_BTHK, w_BTHK, k_BTHK, a_BTHK = (self._by_head(y) for y in (r_BTD, w_BTD, k_BTD, a_BTD))
        v_BTHV = self._by_head(row.without_padding(v_BTE))
        read, written = (-erased_BTHK).to(k_BTD.dtype), (erased_BTHK * a_BTHK).to(k_BTD.dtype)
        o_BTHV = self._recur(r_BTHK, w_BTHK, k_BTHK, v_BTHV, read, written, row)
        # group norm per head, plus the token's value weighted by r, k and ``r_k``; then gate and output projection
        norm, size = self.g_norm, o_BTHV.shape
        with torch.autocast(o_BTHV.device.type, enabled=False):
            flat = wide(o_BTHV).reshape(-1, self.shape.value)
            normed = F.group_norm(flat, norm.num_groups, wide(norm.weight), wide(norm.bias), norm.eps).view(size)
            own_BTH1 = (wide(r_BTHK) * wide(k_BTHK) * wide(self.r_k)).sum(-1, keepdim=True)
            out_BTHV = torch.addcmul(normed, own_BTH1, wide(v_BTHV))
            out_BTE = (out_BTHV.flatten(2) * wide(g_BTE)).to(g_BTE.dtype)
        return self.o_proj(out_BTE), own_BTE if first_BTE is None else first_BTE

    def _by_head(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD.unflatten(-1, (self.shape.heads, -1))

    def _unit(self, k_BTD: torch.Tensor) -> torch.Tensor:
        """Keys of norm 1 in every head."""
        k_BTHK = self._by_head(k_BTD)
        if self.fused_norm:
            return k_BTHK * (k_BTHK.square().sum(-1, keepdim=True) + _KEY_EPSILON).rsqrt()
        return k_BTHK / k_BTHK.norm(dim=-1, keepdim=True).clamp_min(_SMALLEST_NORM)

    def _recur(
        self,
        r_BTHK: torch.Tensor,
        w_BTHK: torch.Tensor,
        k_BTHK: torch.Tensor,
        v_BTHV: torch.Tensor,
        a_BTHK: torch.Tensor,
        b_BTHK: torch.Tensor,
        row: RowContext,
    ) -> torch.Tensor:
        """The output of the recurrence [B, T, H, V]; reads and updates the state in the cache, if there is one."""
        inputs = (r_BTHK, w_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK)
        state = row.cache.get_recurrent_state(self.layer) if row.cache is not None else None
        if state is not None and v_BTHV.shape[1] == 1 and not torch.is_grad_enabled():
            r, w, k, v, a, b = (x[:, 0] for x in inputs)
            return rwkv7_step(r, w, k, v, a, b, state)[:, None]
        out, final = rwkv7(
            *inputs,
            initial_state=state,
            output_final_state=row.cache is not None,
            cu_seqlens=row.cu_seqlens,
            seq_idx=row.seq_idx,
        )
        if row.cache is not None:
            row.cache.update_recurrent_state(cast(torch.Tensor, final), self.layer)
        return out


class ChannelMixing(nn.Module):
    """RWKV-7's feed-forward layer over a token and its predecessor.

    Args:
        shape: the sizes.
        layer: layer index.
        act: ``sqrelu``, the square of a ReLU, or another name that transformers knows.
    """

    def __init__(self, shape: Rwkv7Shape, layer: int, act: str) -> None:
        super().__init__()
        self.layer = layer
        self.x_k = nn.Parameter(torch.zeros(shape.hidden))
        self.key = nn.Linear(shape.hidden, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.hidden, bias=False)
        name = "relu2" if act == "sqrelu" else act
        if name not in ACT2FN:
            what = f"config.json: unknown hidden_act {act!r}"
            raise ModelError(what, remedy="download the checkpoint again", code="model.config_invalid")
        self.act = ACT2FN[name]

    def forward(self, x_BTD: torch.Tensor, row: RowContext) -> torch.Tensor:
        """[B, T, D] of the normed input [B, T, D]."""
        x_BTD = row.without_padding(x_BTD)
        return self.value(self.act(self.key(_shifted(x_BTD, row.previous(x_BTD, self.layer, CHANNEL), self.x_k))))


def _shifted(x_BTD: torch.Tensor, before_BTD: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Interpolate each token towards its predecessor, in the dtype of ``x_BTD``."""
    return (x_BTD + (before_BTD - x_BTD) * share).to(x_BTD.dtype)
