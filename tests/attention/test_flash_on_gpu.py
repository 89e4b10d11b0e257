"""FlashAttention routes on a real GPU: torch's kernels, the flash-attn package, 3 and 4 where they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halftune.attention.flash import (
    FlashAttention,
    Varlen,
    flash_attn_3_varlen,
    flash_attn_4_varlen,
    flash_attn_varlen,
    torch_varlen,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from sm_80 on"
    ),
]
# ‖out − exact‖/‖exact‖ of outputs and gradients, against fp64 on the same rounded inputs
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LENGTHS = (1, 64, 130, 61)
ROUTES: dict[str, tuple[str, Callable[[], Varlen]]] = {
    "torch": ("torch", torch_varlen),
    "flash_attn": ("flash_attn", flash_attn_varlen),
    "flash_attn_3": ("flash_attn_interface", flash_attn_3_varlen),
    "flash_attn_4": ("flash_attn.cute", flash_attn_4_varlen),
}


def needs(module: str) -> None:
    try:
        there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        pytest.skip(f"{module} is not installed")


def operands(rows: int, length: int, size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """q of four heads, k and v of two."""
    made = [torch.randn(rows, heads, length, size, device=device).to(dtype) for heads in (4, 2, 2)]
    return [x.requires_grad_() for x in made]


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], window: int | None
) -> torch.Tensor:
    """[B, T, H, D] in fp64, each sample of a row alone."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(sum(lengths))[:, None] - torch.arange(sum(lengths))
    seen = (sample[:, None] == sample) & (back >= 0) & (back < (window or sum(lengths)))
    scores = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)


def check(
    call: Callable[..., torch.Tensor], rows: int, lengths: tuple[int, ...], window: int | None, **how: Any
) -> None:
    """Output and every gradient of ``call(q, k, v)`` against `exact`."""
    given = operands(rows, sum(lengths), **how)
    truth = [x.detach().double().cpu().requires_grad_() for x in given]
    out, right = call(*given), exact(*truth, lengths=lengths, window=window)
    cotangent = torch.randn(right.shape)
    out.backward(cotangent.to(out))
    right.backward(cotangent.to(out.dtype).double())
    pairs = [(out, right), *((x.grad, y.grad) for x, y in zip(given, truth, strict=True))]
    for found, known in pairs:
        error = (found.detach().double().cpu() - known.detach()).norm() / known.norm()
        assert error < BOUNDS[how["dtype"]], error


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("route", ROUTES)
def test_packed_rows_and_batches(route: str, window: int | None, size: int, dtype: torch.dtype) -> None:
    module, kernel = ROUTES[route]
    needs(module)
    both_ways(FlashAttention(kernel()), window, size=size, dtype=dtype, device="cuda")


def both_ways(flash: FlashAttention, window: int | None, **how: Any) -> None:
    layer, bounds = nn.Module(), torch.tensor([0, *LENGTHS], device=how["device"]).cumsum(0).int()

    def row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash.row(layer, q, k, v, bounds, max(LENGTHS), sliding_window=window)

    def batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash.batch(layer, q, k, v, None, sliding_window=window)[0]

    check(row, 1, LENGTHS, window, **how)
    check(batch, 3, (50,), window, **how)
