"""FlashAttention-2's contract, through the stand-in that enforces it: which check speaks first, and the numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch
from standins.flash import flash_attn_installed
from torch import nn

from halftune.attention.contract import (
    CHECKS,
    ENTRY_POINTS,
    ROTARY_ENTRY_POINT,
    Call,
    Operand,
    lacks_backward,
    violations,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def pretend() -> Iterator[ModuleType]:
    with flash_attn_installed() as module:
        yield module


def made(dtype: torch.dtype = BF16, *, heads: int = 4, size: int = 8, tokens: int = 6) -> torch.Tensor:
    return torch.randn(2, tokens, heads, size, dtype=F32).to(dtype)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    return import_module("flash_attn").flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize(
    ("dtypes", "text"),
    [
        ((F32, F32, F32), "FlashAttention only support fp16 and bf16 data type"),
        ((F32, BF16, BF16), "FlashAttention only support fp16 and bf16 data type"),
        ((BF16, F32, F32), "query and key must have the same dtype"),
        ((BF16, F16, BF16), "query and key must have the same dtype"),
        ((BF16, BF16, F32), "query and value must have the same dtype"),
    ],
)
def test_dtypes(pretend: ModuleType, dtypes: tuple, text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(*(made(dtype) for dtype in dtypes))
    assert str(caught.value) == text


def test_the_capability_is_asked_before_the_dtype(pretend: ModuleType) -> None:
    pretend.capability = (7, 5)
    for dtype in (F32, F16):
        with pytest.raises(RuntimeError, match=r"only supports Ampere GPUs or newer\."):
            call(made(dtype), made(dtype), made(dtype))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": 264}, "FlashAttention forward only supports head dimension at most 256"),
        ({"heads": 3}, "Number of heads in key/value must divide number of heads in query"),
    ],
)
def test_shapes(pretend: ModuleType, changes: dict, text: str) -> None:
    q = made(heads=4, size=changes.get("size", 8))
    with pytest.raises(RuntimeError) as caught:
        call(q, made(**changes), made(**changes))
    assert str(caught.value) == text
    with pytest.raises(RuntimeError, match="v must have shape"):
        call(made(), made(), made(tokens=5))


def test_options(pretend: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="Softcapping does not support dropout for now"):
        call(made(), made(), made(), dropout_p=0.1, softcap=30.0)
    with pytest.raises(RuntimeError, match="ALiBi slopes must have dtype fp32"):
        call(made(), made(), made(), alibi_slopes=torch.ones(4, dtype=BF16))


def test_packed_rows_want_int32_boundaries(pretend: ModuleType) -> None:
    flash = import_module("flash_attn")
    q = torch.randn(10, 4, 8).to(BF16)
    long, short = torch.tensor([0, 4, 10]), torch.tensor([0, 4, 10], dtype=torch.int32)
    for bounds, text in (((long, short), "cu_seqlens_q"), ((short, long), "cu_seqlens_k")):
        with pytest.raises(RuntimeError, match=f"{text} must have dtype int32"):
            flash.flash_attn_varlen_func(q, q, q, *bounds, 6, 6)
    strided = torch.zeros(6, dtype=torch.int32)[::2]
    with pytest.raises(RuntimeError, match="cu_seqlens_q must be contiguous"):
        flash.flash_attn_varlen_func(q, q, q, strided, short, 6, 6)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        flash.flash_attn_varlen_func(q.float(), q, q, long, long, 6, 6)
    with pytest.raises(RuntimeError, match="batch size must be positive"):
        flash.flash_attn_varlen_func(q, q, q, short[:1], short[:1], 6, 6)


def test_what_the_python_side_mends(pretend: ModuleType) -> None:
    q, k, v = (made(size=12) for _ in range(3))
    out = call(q, k, v)
    assert out.shape == q.shape
    turned = made().mT.contiguous().mT  # last dimension not contiguous
    assert turned.stride(-1) != 1
    torch.testing.assert_close(call(turned, turned, turned), call(*[turned.contiguous()] * 3))


@pytest.mark.parametrize("causal", [True, False])
def test_numbers_are_those_of_attention(pretend: ModuleType, causal: bool) -> None:
    q, k, v = made(F16), made(F16, heads=2), made(F16, heads=2)
    for operand in (q, k, v):
        operand.requires_grad_()
    out = call(q, k, v, causal=causal)
    double = [operand.detach().double().transpose(1, 2).requires_grad_() for operand in (q, k, v)]
    ref = nn.functional.scaled_dot_product_attention(*double, is_causal=causal, enable_gqa=True)
    ahead = torch.randn(out.shape)
    out.backward(ahead.to(F16))
    ref.backward(ahead.to(F16).double().transpose(1, 2))
    pairs = [(out, ref), *((mine.grad, theirs.grad) for mine, theirs in zip((q, k, v), double, strict=True))]
    for got, want in pairs:
        assert got is not None
        assert want is not None
        mine, want = got.detach().double(), want.detach().transpose(1, 2)
        assert float((mine - want).norm() / want.norm()) < 2e-3


def test_a_window_and_fewer_queries_than_keys(pretend: ModuleType) -> None:
    q, k, v = made(tokens=2), made(tokens=6), made(tokens=6)
    whole = call(torch.cat([made(tokens=4), q], 1), k, v, causal=True, window_size=(2, 0))
    torch.testing.assert_close(call(q, k, v, causal=True, window_size=(2, 0)), whole[:, 4:])
    lonely = call(made(tokens=6), made(tokens=2), made(tokens=2), causal=True)
    assert torch.count_nonzero(lonely[:, :4]) == 0, "queries before the first key give zero"


def test_the_silent_hole_is_silent(pretend: ModuleType) -> None:
    pretend.capability = (8, 6)
    assert lacks_backward((8, 6), 256, 0.1)
    assert not lacks_backward((8, 6), 192, 0.1)
    assert not lacks_backward((8, 0), 256, 0.1)
    assert not lacks_backward(None, 256, 0.1)
    q = made(size=256).requires_grad_()
    call(q, made(size=256), made(size=256), dropout_p=0.1).sum().backward()
    assert q.grad is not None
    assert q.grad.isnan().all()


def test_the_rotary_helper_by_version(pretend: ModuleType) -> None:
    rotary = import_module("flash_attn.layers.rotary").apply_rotary_emb
    x, cos, sin = made(F32), torch.randn(6, 4).to(BF16), torch.randn(6, 4).to(BF16)
    assert rotary(x, cos, sin).dtype == F32
    pretend.version = (2, 7, 4)
    with pytest.raises(AssertionError) as caught:
        rotary(x, cos, sin)
    assert str(caught.value) == "Input and cos/sin must have the same dtype, got torch.float32 and torch.bfloat16"
    with pytest.raises(AssertionError, match="cos and sin must have the same dtype"):
        rotary(x, cos, sin.float())
    with pytest.raises(AssertionError, match="rotary_dim must be <= headdim"):
        rotary(x, torch.randn(6, 5), torch.randn(6, 5))


def test_order_and_backward_checks() -> None:
    half = Operand("bfloat16", (1, 4, 2, 64))
    wrong = Call(replace(half, dtype="float32"), half, half, capability=(7, 0))
    assert list(violations(wrong))[:3] == [CHECKS[0].text, CHECKS[1].text, "query and key must have the same dtype"]
    back = Call(half, half, half, kind="backward", out=half, dout=replace(half, dtype="float32", last_stride=2))
    assert list(violations(back)) == [
        "query and dout must have the same dtype",
        "dout tensor must have contiguous last dimension",
    ]
    assert list(violations(Call(half, half, half))) == []


def test_every_entry_point_exists_with_its_operands(pretend: ModuleType) -> None:
    second = [entry for entry in ENTRY_POINTS if entry.module.startswith("flash_attn.")]
    for entry in (*second, ROTARY_ENTRY_POINT):
        function = vars(import_module(entry.module))[entry.name]
        assert list(inspect.signature(function).parameters)[: len(entry.operands)] == list(entry.operands)


def test_padding_goes_there_and_back(pretend: ModuleType) -> None:
    padding = import_module("flash_attn.bert_padding")
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    x = torch.randn(2, 3, 4)
    tokens, indices, cu, longest, counts = padding.unpad_input(x, mask)
    assert (cu.tolist(), longest, counts.tolist(), cu.dtype) == ([0, 2, 5], 3, [2, 3], torch.int32)
    torch.testing.assert_close(padding.pad_input(tokens, indices, 2, 3), x * mask[..., None])
