"""Operators run on the GPU of their tensors, whichever is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halftune_kernels.arguments import without_autocast


def test_the_current_gpu_is_that_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts kernels on the current one: with tensors of another it would read memory that is not there."""
    current = [torch.device("cuda:0")]

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)

    @without_autocast
    def where(scale: float, x: torch.Tensor) -> torch.device:
        del scale, x
        return current[-1]

    with FakeTensorMode():
        assert where(1.0, torch.empty(2, device="cuda:1")) == torch.device("cuda:1")
        assert where(1.0, x=torch.empty(2)) == torch.device("cuda:0")
    assert current == [torch.device("cuda:0")]
