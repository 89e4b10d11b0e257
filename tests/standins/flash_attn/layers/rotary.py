"""The rotary helper, with the checks of the version that the stand-in pretends to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flash_attn import pretend
from halftune.attention.contract import MAX_HEAD_DIM, Operand


@dataclass(frozen=True)
class RotaryCheck:
    """A check of ``flash_attn``'s rotary function, which raises AssertionError if it fails.

    Attributes:
        holds: the condition on the operands x, cos, sin.
        text: format string of the message, with the operands.
        last: last version (major, minor, patch) with this check; None for all versions.
    """

    holds: Callable[[Operand, Operand, Operand], bool]
    text: str
    last: tuple[int, int, int] | None = None


ROTARY_CHECKS: tuple[RotaryCheck, ...] = (
    RotaryCheck(lambda x, cos, sin: sin.shape == cos.shape, ""),
    RotaryCheck(lambda x, cos, sin: 2 * cos.shape[-1] <= x.shape[-1], "rotary_dim must be <= headdim"),
    RotaryCheck(lambda x, cos, sin: x.shape[-1] <= MAX_HEAD_DIM, "Only support headdim <= 256"),
    RotaryCheck(lambda x, cos, sin: cos.shape[0] >= x.shape[1], "seqlen_ro must be >= seqlen"),
    RotaryCheck(
        lambda x, cos, sin: cos.dtype == sin.dtype,
        "cos and sin must have the same dtype, got torch.{cos.dtype} and torch.{sin.dtype}",
        last=(2, 7, 4),
    ),
    RotaryCheck(
        lambda x, cos, sin: x.dtype == cos.dtype,
        "Input and cos/sin must have the same dtype, got torch.{x.dtype} and torch.{cos.dtype}",
        last=(2, 7, 4),
    ),
)


def rotary_violations(x: Operand, cos: Operand, sin: Operand, version: tuple[int, int, int]) -> Iterator[str]:
    """Messages of all failed checks of a version's rotary function, in order."""
    for check in ROTARY_CHECKS:
        if (check.last is None or version <= check.last) and not check.holds(x, cos, sin):
            yield check.text.format(x=x, cos=cos, sin=sin)


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
