"""Attention sample by sample as one operator, opaque to torch.compile: it reads the lengths, which would end a graph.

Only compiled code calls it. The backward pass computes the samples again. Shapes: H query heads, G key/value heads, T
tokens of the packed row, D head size of q and k, E of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halftune.attention.segments import segment_attention

_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


@torch.library.custom_op("halftune::segment_attention", mutates_args=())
def segments(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_lens: Tensor, scale: float | None, causal: bool, window: int | None
) -> Tensor:
    """``q`` ``[1, H, T, D]``, ``k`` ``[1, G, T, D]``, ``v`` ``[1, G, T, E]`` → ``[1, T, H, E]``.

    Args:
        q, k, v: of one dtype.
        cu_seq_lens: ``[S + 1]`` integers from 0 to T.
        scale: of the scores; None for D^-½.
        causal, window: see ``segment_attention``.
    """
    return _segments((q, k, v), cu_seq_lens, scale, causal, window).contiguous()


@torch.library.custom_op("halftune::segment_attention_backward", mutates_args=())
def segments_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_lens: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output ``[1, T, H, E]``."""
    with _differentiating():
        given = tuple(one.detach().requires_grad_() for one in (q, k, v))
        out = _segments(given, cu_seq_lens, scale, causal, window)
        found = torch.autograd.grad(out, given, grad)
    return tuple(one.contiguous() for one in found)  # type: ignore[return-value]


def _segments(
    operands: tuple[Tensor, ...], cu_seq_lens: Tensor, scale: float | None, causal: bool, window: int | None
) -> Tensor:
    q, k, v = operands
    options = {"scaling": scale, "is_causal": causal, "sliding_window": window}
    return segment_attention(nn.Module(), q, k, v, cu_seq_lens, **options)


@contextmanager
def _differentiating() -> Iterator[None]:
    """Inside an operator, where autograd is left out, operations are recorded."""
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for key in _AUTOGRAD:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


@segments.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


@segments_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, cu_seq_lens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, cu_seq_lens)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*segments_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None)


segments.register_autograd(_gradients, setup_context=_save)
