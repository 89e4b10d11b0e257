"""Kept tensors have data, whatever mode they were first asked for in."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from halftune_kernels.constants import constant


def test_what_was_made_without_data_is_not_kept() -> None:
    made = []

    @constant(4)
    def ones(size: int) -> torch.Tensor:
        made.append(size)
        return torch.ones(size)

    with FakeTensorMode():
        assert isinstance(ones(3), FakeTensor)
    assert float(ones(3).sum()) == 3
    assert ones(3) is ones(3)
    with FakeTensorMode():
        assert isinstance(ones(3), FakeTensor)
    assert made == [3, 3, 3]
