"""Attention kernels on paper: operators with shapes, without numbers, whose cost is known by the samples' boundaries.

FlashAttention 2, 3 and 4, whose packages need not be installed: operands, results and what is kept for the backward
pass are those of `halftune.attention.flash_op`. Flex attention of packed rows: torch's own is a higher-order operator,
compiled where it runs. N tokens; H, G heads; head sizes D and E.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halftune.attention.flex import RowMask
from halftune.core.optional import need

_KERNELS = {"flash_attn": "fa2", "flash_attn_interface": "fa3", "flash_attn.cute": "fa4"}  # of costs, by module
_Sums = tuple[Tensor, Tensor]
_Gradients = tuple[Tensor, Tensor, Tensor]


def package(module: str, **options: Any) -> Any:
    """Return a stand-in for a FlashAttention package; other packages are imported as by ``need``."""
    if module not in _KERNELS:
        return need(module, **options)
    return SimpleNamespace(flash_attn_varlen_func=_varlen(_operator(_KERNELS[module])))


def _varlen(kernel: Callable[..., _Sums]) -> Callable[..., Tensor]:
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *_: Any,
        causal: bool,
        window_size: tuple[int | None, int | None],
        **__: Any,
    ) -> Tensor:
        left, right = (-1 if side is None else side for side in window_size)
        return kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, left, 0 if causal else right)[0]

    return flash_attn_varlen_func


@cache
def _operator(name: str) -> Callable[..., _Sums]:
    def forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, left: int, right: int) -> _Sums:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def gradients(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, cu_q: Tensor, cu_k: Tensor,
        left: int, right: int,
    ) -> _Gradients:  # fmt: skip
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def save(ctx: Any, inputs: tuple[Any, ...], output: _Sums) -> None:
        q, k, v, cu_q, cu_k, *ctx.window = inputs
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return (*back(grad, *ctx.saved_tensors, *ctx.window), *(None,) * 4)

    made = torch.library.custom_op(f"halftune::{name}_on_paper", forward, mutates_args=())
    back = torch.library.custom_op(f"halftune::{name}_on_paper_backward", gradients, mutates_args=())
    made.register_fake(forward)
    back.register_fake(gradients)
    made.register_autograd(backward, setup_context=save)
    return made


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


def _save_flex(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seq_lens, *ctx.window = inputs
    ctx.save_for_backward(q, k, v, output[0], cu_seq_lens)


def _flex_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*flex_attention_backward(grad, *ctx.saved_tensors, *ctx.window), None, None, None)


flex_attention.register_autograd(_flex_gradients, setup_context=_save_flex)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """What ``halftune.attention.flex.attend`` launches."""
    left = -1 if mask.window is None else mask.window - 1
    heads = [operand[0].transpose(0, 1) for operand in (query, key, value)]
    out, log_sums = flex_attention(*heads, mask.cu_seq_lens, left, 0 if mask.causal else left)
    return out.transpose(0, 1)[None], log_sums.transpose(0, 1)[None]
