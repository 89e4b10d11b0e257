"""Tensors without data: whole numbers have values unless they were computed from floating ones."""

from __future__ import annotations

import pytest
import torch

from halftune.precision.trace.fake_tensors import NEEDS_VALUES, FakeTensors
from halftune_kernels.ops.rwkv7 import rwkv7


def test_whole_numbers_made_from_floats_have_no_values() -> None:
    """As in a router that counts how many tokens each expert gets."""
    with FakeTensors():
        chosen = torch.randn(4, 8).topk(2, dim=1).indices
        counts = torch.zeros(4, 8).scatter(1, chosen, 1).long().sum(0)
        with pytest.raises(NEEDS_VALUES):
            counts.tolist()
        assert torch.zeros(3, dtype=torch.int64).add(torch.arange(3)).tolist() == [0, 1, 2]


def gradient(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(1, 24, 2, 16, generator=generator, dtype=torch.float64) for _ in range(6)]
    r, w, k, v, a, b = (one.to(dtype).requires_grad_() for one in drawn)
    rwkv7(r, -w.abs(), 0.2 * k, v, 0.1 * a, 0.1 * b)[0].sum().backward()
    assert w.grad is not None
    return w.grad


def test_an_operator_that_ran_without_data_gives_the_same_gradient_afterwards() -> None:
    """With a constant of the trace kept, the sum that it was added to would miss it without an error."""
    with FakeTensors():
        gradient(torch.float16)
    fresh = gradient(torch.float64)
    torch.testing.assert_close(gradient(torch.float16).double(), fresh, rtol=0.05, atol=0.05)
