"""What a scan says that it keeps between its passes is what autograd is given to keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halftune_kernels import gated_delta_rule, kda, rwkv7, simple_decay
from halftune_kernels.memory import KEPT_BYTES, held_in_torch

CALLS: dict[str, Callable[..., Any]] = {
    "gated_delta_rule": functools.partial(gated_delta_rule, use_qk_l2norm_in_kernel=True),
    "ssd": simple_decay,
    "kda": kda,
    "rwkv7": rwkv7,
}


@pytest.mark.parametrize(
    ("operator", "samples", "length", "heads", "groups", "size"),
    [
        ("gated_delta_rule", 2, 576, 4, 2, 16),
        ("gated_delta_rule", 1, 1024, 16, 8, 64),  # the second half does not fit
        ("ssd", 2, 576, 8, 1, 16),
        ("ssd", 1, 64, 32, 1, 16),
        ("kda", 1, 128, 2, 2, 16),
        ("rwkv7", 2, 128, 2, 2, 16),
    ],
)
def test_kept_as_said(operator: str, samples: int, length: int, heads: int, groups: int, size: int) -> None:
    q, k = torch.randn(2, samples, length, groups, size).unbind()
    v, gate = torch.randn(samples, length, heads, size), -torch.rand(samples, length, heads)
    each, beta = gate[..., None].expand(*gate.shape, size).contiguous(), gate.exp()
    operands = {
        "gated_delta_rule": (q, k, v, gate, beta),
        "ssd": (q, k, v, gate),
        "kda": (q, k, v, each, beta),
        "rwkv7": (q, each, k, v, q, k),
    }[operator]
    given: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        return tensor

    v.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        CALLS[operator](*operands)
    beside = sum(x.nbytes for x in given) - sum(x.nbytes for x in operands)
    held = held_in_torch(operator, samples, length, heads=heads, groups=groups, keys=size, values=size)
    assert beside == held.kept
    assert held.workspace > 0


def test_no_more_is_kept_than_is_said() -> None:
    """Beside states; a row that no longer fits is computed again."""
    for length in (64, 512, 4096, 32_768):
        held = held_in_torch("gated_delta_rule", 1, length, heads=16, groups=8, keys=128, values=128)
        assert held.kept <= KEPT_BYTES + length // 512 * 16 * 128 * 128 * 4
