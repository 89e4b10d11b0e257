"""Attention by samples as one operator: the function's own numbers and gradients, and what torch asks of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halftune.attention.segments import segment_attention
from halftune.attention.segments_op import segments

CU = torch.tensor([0, 5, 6, 24], dtype=torch.int32)


def operands() -> list[torch.Tensor]:
    return [torch.randn(1, heads, 24, 16, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("window", [None, 3])
def test_it_is_the_function(window: int | None) -> None:
    given = operands()
    again = [one.detach().clone().requires_grad_() for one in given]
    out = segments(*given, CU, None, True, window)
    right = segment_attention(nn.Module(), *again, CU, sliding_window=window)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    right.backward(cotangent)
    for one, other in ((out, right), *((x.grad, y.grad) for x, y in zip(given, again, strict=True))):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_operator_keeps_torchs_promises() -> None:
    torch.library.opcheck(segments, (*operands(), CU, 0.25, True, None))
