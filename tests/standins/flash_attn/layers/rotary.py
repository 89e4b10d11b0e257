"""The rotary helper, with the checks of the version that the stand-in pretends to be."""

from __future__ import annotations

import torch

from flash_attn import pretend
from halftune.attention.contract import Operand, rotary_violations


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """``x`` ``[B, T, H, D]``; ``cos``, ``sin`` ``[T, R / 2]`` → like ``x``, its first R channels turned."""
    pretend.calls.append(("apply_rotary_emb", (x.dtype, cos.dtype, sin.dtype)))
    for text in rotary_violations(*map(Operand.of, (x, cos, sin)), pretend.version):
        raise AssertionError(text)
    turned = 2 * cos.shape[-1]
    head, tail = x[..., :turned].float(), x[..., turned:]
    c, s = (table[: x.shape[1], None].float() for table in (cos, sin))
    if interleaved:
        a, b = head[..., ::2], head[..., 1::2]
        mixed = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = head.chunk(2, -1)
        mixed = torch.cat((a * c - b * s, a * s + b * c), -1)
    out = torch.cat((mixed.to(x.dtype), tail), -1)
    return x.copy_(out) if inplace else out
