"""torch's FlashAttention-2 kernels for packed rows as one operator, opaque to torch.compile.

torch ≥ 2.11 has them behind ``aten::_flash_attention_forward`` and ``_backward``: with sample boundaries, scale, window
and grouped heads on every version, which ``torch.nn.attention.varlen`` has from 2.12 on. The backward pass rounds the
same each time if torch's deterministic algorithms are enabled. N query, M key tokens; H, G heads; head size D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("halftune::flash_varlen", mutates_args=())
def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """``q`` ``[N, H, D]``, ``k``, ``v`` ``[M, G, D]`` → output ``[N, H, D]`` and fp32 log Σ exp ``[H, N]``.

    Args:
        q, k, v: fp16 or bf16, D ≤ 256 and a multiple of 8.
        cu_q, cu_k: int32 ``[S + 1]``, sample boundaries.
        max_q, max_k: lengths of the longest samples.
        scale: of the scores; None for D^-½.
        left, right: window around a query, -1 for unlimited; (-1, 0) is causal, aligned to the last key.
    """
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    causal = (left, right) == (-1, 0)  # a window that ends at the query is no causal mask to the kernel
    found = torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, **options)
    return found[0], found[1]


@torch.library.custom_op("halftune::flash_varlen_backward", mutates_args=())
def flash_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output ``[N, H, D]``."""
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    # rng_state and unused of the operator's schema
    no_dropout = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    rest = (cu_q, cu_k, max_q, max_k, 0.0, (left, right) == (-1, 0), *no_dropout)
    return torch.ops.aten._flash_attention_backward(grad.contiguous(), q, k, v, out, log_sums, *rest, **options)


@flash_varlen.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@flash_varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found = (None,) * 3 if grad is None else flash_varlen_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*found, *(None,) * 7)


flash_varlen.register_autograd(_gradients, setup_context=_save)
