"""Flex attention of packed rows on paper: an operator whose cost is known by the samples' boundaries.

torch's own is a higher-order operator, compiled where it runs. N tokens; H, G heads; head sizes D and E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halftune.attention.flex import RowMask


@torch.library.custom_op("halftune::flex_attention", mutates_args=())
def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_lens: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """``q`` ``[N, H, D]``, ``k`` ``[N, G, D]``, ``v`` ``[N, G, E]`` → ``[N, H, E]``, fp32 log Σ exp ``[N, H]``."""
    raise AssertionError("fake tensors run no kernels")


@torch.library.custom_op("halftune::flex_attention_backward", mutates_args=())
def flex_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seq_lens: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output."""
    raise AssertionError("fake tensors run no kernels")


@flex_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)


@flex_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seq_lens, *ctx.window = inputs
    ctx.save_for_backward(q, k, v, output[0], cu_seq_lens)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*flex_attention_backward(grad, *ctx.saved_tensors, *ctx.window), None, None, None)


flex_attention.register_autograd(_gradients, setup_context=_save)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What ``halftune.attention.flex.attend`` launches."""
    left = -1 if mask.window is None else mask.window - 1
    heads = [operand[0].transpose(0, 1) for operand in (query, key, value)]
    out, log_sums = flex_attention(*heads, mask.cu_seq_lens, left, 0 if mask.causal else left)
    return out.transpose(0, 1)[None], log_sums.transpose(0, 1)[None]
