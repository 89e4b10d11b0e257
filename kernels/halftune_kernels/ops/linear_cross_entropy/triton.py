"""A chunk of logits to losses and, in its place, their gradient, in Triton: one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halftune_kernels.launch import Config, power_of_two, start

_TILE = 4096  # columns at a time


@triton.jit
def losses_and_gradient(
    logits, targets, losses, words, stride, scale, smoothing,
    S: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Two passes over the row, the second from the cache: maximum and sum, then the gradient over the logits."""
    row = tl.cast(tl.program_id(0), tl.int64)
    target = tl.load(targets + row)
    at = logits + row * stride
    if target < 0:
        tl.store(losses + row, 0.0)
        if WANTED:
            for first in range(0, words, S):
                column = first + tl.arange(0, S)
                tl.store(at + column, tl.zeros((S,), tl.float32).to(logits.dtype.element_ty), mask=column < words)
    else:
        top = tl.full((S,), float("-inf"), tl.float32)
        total = tl.zeros((S,), tl.float32)
        plain = tl.zeros((S,), tl.float32)
        for first in range(0, words, S):
            column = first + tl.arange(0, S)
            x = tl.load(at + column, mask=column < words, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, x)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.exp(x - safe)
            top = higher
            plain += tl.where(column < words, x, 0.0)
        most = tl.max(top, 0)
        log_sum = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
        chosen = tl.load(at + target, mask=target < words, other=float("nan")).to(tl.float32)
        loss = (1.0 - smoothing) * (log_sum - chosen) + smoothing * (log_sum - tl.sum(plain, 0) / words)
        tl.store(losses + row, loss)
        if WANTED:
            tl.debug_barrier()  # every thread has read the target's logit
            for first in range(0, words, S):
                column = first + tl.arange(0, S)
                x = tl.load(at + column, mask=column < words, other=float("-inf")).to(tl.float32)
                slope = tl.where(target < words, 0.0, float("nan"))
                slope += tl.exp(x - log_sum) - smoothing / words - tl.where(column == target, 1.0 - smoothing, 0.0)
                tl.store(at + column, (slope * scale).to(logits.dtype.element_ty), mask=column < words)


def losses_in_place(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, smoothing: float, wanted: bool
) -> torch.Tensor:
    """Losses ``[N]``, fp32; ``logits`` become their gradient times ``scale`` if ``wanted``.

    Loss and gradient of a target beyond the vocabulary are NaN: a CPU raises an error, and here nothing may wait.
    """
    (rows, words), losses = logits.shape, logits.new_empty(logits.shape[0], dtype=torch.float32)
    tile = min(_TILE, power_of_two(words))
    given = logits, targets.contiguous(), losses, words, logits.stride(0), scale, smoothing
    start(losses_and_gradient, (rows,), Config(tile, 8, 1), *given, S=tile, WANTED=wanted)
    return losses
