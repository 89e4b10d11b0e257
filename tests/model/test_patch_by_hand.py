"""Functions of flash_attn that a model calls by hand: the guard also refuses what the kernel gets wrong in silence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from standins.flash import flash_attn_installed
from tiny_model import plan

from halftune.core.errors import ModelError
from halftune.model import patch
from halftune.model.patch import guard_imports_by_hand, registered_attention
from halftune.precision.patched import unpatch


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """flash_attn's function behind the guard, on what says that it is an RTX 3090."""
    with flash_attn_installed() as pretend, registered_attention(plan("bf16")):
        pretend.capability = (8, 6)
        monkeypatch.setattr(patch, "capability_of", lambda tensor: (8, 6))
        assert "flash_attn.flash_attn_func" in guard_imports_by_hand()
        yield importlib.import_module("flash_attn").flash_attn_func
        unpatch()


def heads(size: int) -> torch.Tensor:
    return torch.randn(1, 4, 2, size, dtype=torch.bfloat16, requires_grad=True)


def test_gradients_that_no_kernel_would_write_are_refused(attend: Callable) -> None:
    q = heads(256)
    for call in (lambda: attend(q, q, q, dropout_p=0.1), lambda: attend(q, q, q, 0.1)):
        with pytest.raises(ModelError, match=r"unwritten for head size 256 with dropout on compute capability 8\.6"):
            call()


@pytest.mark.parametrize(("size", "dropout"), [(256, 0.0), (192, 0.1)])
def test_what_the_kernel_does_right_passes(attend: Callable, size: int, dropout: float) -> None:
    q = heads(size)
    attend(q, q, q, dropout).float().sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_without_gradients_there_is_no_hole(attend: Callable) -> None:
    q = heads(256)
    with torch.no_grad():
        assert torch.isfinite(attend(q, q, q, 0.1)).all()
