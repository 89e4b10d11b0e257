"""The operator on torch's FlashAttention-2 kernels: what it passes them, its gradients, and compiled code around it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from halftune.attention.contract import Call, Operand, violations
from halftune.attention.flash import FlashAttention, torch_varlen
from halftune.attention.flash_op import flash_varlen, flash_varlen_backward
from halftune.attention.segments import segment_attention

LENGTHS = (5, 1, 9, 9)
CALLS: list[str] = []


def _dense(
    operands: tuple[Tensor, ...], lengths: tuple[Tensor, Tensor], scale: Any, window: Any, grad: Tensor | None = None
) -> tuple[Tensor, ...]:
    """What the kernel computes, in fp32: the output, or with ``grad`` the gradients of q, k and v."""
    q, k, v = operands
    (left, right), groups, factor = window, q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    parts = []
    for (a, b), (c, d) in zip(*(pairwise(cu.tolist()) for cu in lengths), strict=True):
        queries, keys, values = q[a:b].float(), *(x[c:d].float().repeat_interleave(groups, 1) for x in (k, v))
        back = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        hidden = (back > left if left >= 0 else back > d) | (back < -right if right >= 0 else back < -b)
        chances = (torch.einsum("qhd,khd->hqk", queries, keys) * factor).masked_fill(hidden, -torch.inf).softmax(-1)
        if grad is None:
            parts.append((torch.einsum("hqk,khd->qhd", chances, values),))
            continue
        by_chance = torch.einsum("qhd,khd->hqk", grad[a:b].float(), values)
        by_score = chances * (by_chance - (by_chance * chances).sum(-1, keepdim=True)) * factor
        by_key = (
            torch.einsum("hqk,qhd->khd", by_score, queries),
            torch.einsum("hqk,qhd->khd", chances, grad[a:b].float()),
        )
        shared = (one.unflatten(1, (-1, groups)).sum(2) for one in by_key)
        parts.append((torch.einsum("hqk,khd->qhd", by_score, keys), *shared))
    return tuple(torch.cat(one).to(q.dtype) for one in zip(*parts, strict=True))


def _check(kind: Any, q: Tensor, k: Tensor, v: Tensor, *cu: Tensor, **more: Operand) -> None:
    found = list(
        violations(Call(*map(Operand.of, (q, k, v)), kind=kind, cu_seqlens=tuple(map(Operand.of, cu)), **more))
    )
    assert not found, found
    CALLS.append(kind)


def _forward(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,  # the dispatcher leaves defaults out
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    _check("varlen", q, k, v, cu_q, cu_k)
    assert (dropout, debug) == (0.0, False)
    assert causal == ((window_size_left, window_size_right) == (-1, 0))
    assert max_q >= max(cu_q.diff().tolist())
    (out,) = _dense((q, k, v), (cu_q, cu_k), scale, (window_size_left, window_size_right))
    sums = torch.zeros(q.shape[1], q.shape[0])
    return out, sums, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    sums: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng: Any,
    unused: Any,
    *,
    scale: float | None = None,
    **window: int,
) -> tuple[Tensor, ...]:
    _check("backward", q, k, v, out=Operand.of(out), dout=Operand.of(grad))
    assert sums.shape == (q.shape[1], q.shape[0])
    return _dense((q, k, v), (cu_q, cu_k), scale, (window["window_size_left"], window["window_size_right"]), grad)


@pytest.fixture(scope="module", autouse=True)
def _kernels_on_cpu() -> Iterator[None]:
    """Stand-ins for torch's kernels behind their own operators: what these cannot bind, torch could not either."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = [torch.randn(1, heads, sum(LENGTHS), 16).to(dtype) for heads in (4, 2, 2)]
    return [one.requires_grad_() for one in made]


def bounds() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.mark.parametrize("window", [None, 3])
def test_packed_samples_are_as_alone(window: int | None) -> None:
    CALLS.clear()
    q, k, v = operands()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = FlashAttention(torch_varlen()).row(torch.nn.Module(), q, k, v, bounds(), max(LENGTHS), sliding_window=window)
    right = segment_attention(torch.nn.Module(), *exact, bounds(), sliding_window=window)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    right.backward(cotangent.double())
    for found, known in ((out, right), *((x.grad, y.grad) for x, y in zip((q, k, v), exact, strict=True))):
        assert (found.double() - known).norm() / known.norm() < 1e-2
    assert CALLS == ["varlen", "backward"], "one call a row, however many samples"


def test_the_real_kernels_take_the_arguments() -> None:
    """torch's own shape functions of them, on a GPU that is not there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(24, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        cu = torch.empty(5, dtype=torch.int32, device="cuda")
        options = (cu, cu, 9, 9, None, -1, 0)
        real = flash_varlen._init_fn(q, k, v, *options)  # type: ignore[attr-defined]
        fake = flash_varlen(q, k, v, *options)
        back = flash_varlen_backward._init_fn(torch.empty_like(q), q, k, v, *real, *options)  # type: ignore[attr-defined]
        for one, other in zip((*real, *back), (*fake, q, k, v), strict=True):
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def test_operator_keeps_torchs_promises() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in operands())
    torch.library.opcheck(flash_varlen, (q, k, v, bounds(), bounds(), 9, 9, None, -1, 0))


def test_compiled_code_keeps_it_whole() -> None:
    flash, q, k, v = FlashAttention(torch_varlen()), *operands()

    def layer(q: Tensor, longest: int) -> Tensor:
        return flash.row(torch.nn.Module(), q * 2, k, v, bounds_, longest) + 1

    bounds_ = bounds()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, 9), layer(q, 9))
    torch.testing.assert_close(compiled(q, 11), layer(q, 11))
