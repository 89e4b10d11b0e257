"""FlashAttention 2, 3 and 4 on paper, whose packages need not be installed: operators with shapes, without numbers.

Operands, results and what is kept for the backward pass are those of `halftune.attention.flash_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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
