"""The flash routes on a CPU stand-in of the varlen kernels: padded, full and packed batches, decoding, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

from halftune.attention.backends import BACKENDS
from halftune.attention.contract import AttentionPlan
from halftune.attention.flash import (
    FlashAttention,
    flash_attn_3_varlen,
    flash_attn_4_varlen,
    flash_attn_varlen,
    torch_varlen,
)
from halftune.attention.varlen import attention_callable
from halftune.core.choice import Choice
from halftune.core.errors import ModelError
from halftune.core.table import named
from halftune.train.numeric_environment import set_rounding

D = 8


def flash_attn_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """What flash_attn_varlen_func computes (causality aligned to the last key), and what it insists on."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert type(max_seqlen_q) is int
    assert type(max_seqlen_k) is int
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert dropout_p == 0
    groups = q.shape[1] // k.shape[1]
    outputs = []
    for index in range(len(cu_seqlens_q) - 1):
        a, b = (slice(int(cu[index]), int(cu[index + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        queries, keys = a.stop - a.start, b.stop - b.start
        assert queries <= max_seqlen_q
        assert keys <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[a], k[b].repeat_interleave(groups, 1)) * (softmax_scale or D**-0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
        seen = torch.ones_like(distance, dtype=torch.bool)
        left, right = window_size
        if causal or right >= 0:
            seen &= distance >= (0 if causal else -right)
        if left >= 0:
            seen &= distance <= left
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[b].repeat_interleave(groups, 1)))
    return torch.cat(outputs)


def torch_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
) -> tuple[torch.Tensor, None]:
    """The same behind the signature of our operator on torch's kernels."""
    lengths = (cu_q, cu_k, max_q, max_k)
    return flash_attn_stand_in(q, k, v, *lengths, softmax_scale=scale, window_size=(left, right)), None


def flash_attn_3_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """FlashAttention-3's names, in its order: no dropout."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_stand_in(q, k, v, *lengths, 0.0, softmax_scale, causal, window_size, softcap)


def flash_attn_4_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window_size: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention-4: no limit is None, and log Σ exp comes along."""
    assert all(side is None or side >= 0 for side in window_size)
    window = tuple(-1 if side is None else side for side in window_size)
    return flash_attn_3_stand_in(q, k, v, window_size=window, **options), None  # type: ignore[arg-type]


KERNELS = {
    "flash_attn": flash_attn_varlen(flash_attn_stand_in),
    "flash_attn_3": flash_attn_3_varlen(flash_attn_3_stand_in),
    "flash_attn_4": flash_attn_4_varlen(flash_attn_4_stand_in),
    "torch": torch_varlen(torch_stand_in),
}


@pytest.fixture(params=sorted(KERNELS))
def flash(request: pytest.FixtureRequest) -> FlashAttention:
    return FlashAttention(KERNELS[request.param])


class Layer(nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def operands(rows: int, queries: int, keys: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, queries), (2, keys or queries), (2, keys or queries))
    return [
        torch.randn(rows, length, heads, D, generator=generator).transpose(1, 2).requires_grad_()
        for heads, length in shapes
    ]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * D**-0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)


def causal(queries: int, keys: int, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys + 1))


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_full_batch(flash: FlashAttention, window: int | None) -> None:
    q, k, v = operands(3, 11)
    out, weights = flash.batch(Layer(), q, k, v, None, scaling=D**-0.5, sliding_window=window)
    assert weights is None
    torch.testing.assert_close(out, reference(q, k, v, causal(11, 11, window)))


def test_without_causality(flash: FlashAttention) -> None:
    q, k, v = operands(2, 9)
    everywhere = torch.ones(9, 9, dtype=torch.bool)
    torch.testing.assert_close(flash.batch(Layer(False), q, k, v, None)[0], reference(q, k, v, everywhere))
    torch.testing.assert_close(flash.batch(Layer(), q, k, v, None, is_causal=False)[0], reference(q, k, v, everywhere))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(flash: FlashAttention, side: str) -> None:
    q, k, v = operands(3, 10)
    real = torch.tensor([10, 4, 7])
    mask = torch.arange(10) < real[:, None]
    mask = mask.flip(1) if side == "left" else mask
    out, _ = flash.batch(Layer(), q, k, v, mask)
    for row, length in enumerate(real.tolist()):
        at = mask[row]
        alone = reference(*(tensor[row : row + 1, :, at] for tensor in (q, k, v)), causal(length, length))
        torch.testing.assert_close(out[row : row + 1, at], alone)
        assert (out[row, ~at] == 0).all()
    out.sum().backward()
    padding = ~mask[:, None, :, None]
    assert (v.grad.masked_select(padding.expand_as(v)) == 0).all()
    assert v.grad.masked_select(~padding.expand_as(v)).abs().min() > 0


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 4])
def test_queries_behind_a_cache(flash: FlashAttention, queries: int, window: int | None) -> None:
    q, k, v = operands(2, queries, 12)
    seen = causal(queries, 12, window)
    torch.testing.assert_close(flash.batch(Layer(), q, k, v, None, sliding_window=window)[0], reference(q, k, v, seen))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :5] = False  # prompts of a batch are padded on the left
    out, _ = flash.batch(Layer(), q, k, v, mask, sliding_window=window)
    torch.testing.assert_close(out[:1], reference(q[:1], k[:1], v[:1], seen))
    torch.testing.assert_close(out[1:], reference(q[1:], k[1:, :, 5:], v[1:, :, 5:], seen[:, 5:]))


@pytest.mark.parametrize("varlen", ["flash_attn_varlen", "torch_varlen"])
def test_packed_row_takes_ints_and_never_waits(varlen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def because(value: str) -> Choice[str]:
        return Choice(value, "the test says so")

    name = varlen.removesuffix("_varlen")
    plan = AttentionPlan(because("fa2"), because(name), because(varlen), because("none"), (), "cast")
    asked: list[int] = []

    def kernel(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        asked.append(args[4])
        return KERNELS[name](q, *args, **options)

    attend = attention_callable(plan, FlashAttention(kernel))
    q, k, v = operands(1, 12)
    lengths = [5, 4, 3]
    cu = torch.tensor([0, 5, 9, 12])  # int64: converted
    out, _ = attend(Layer(), q, k, v, None, cu_seq_lens_q=cu, max_length_q=5, sliding_window=3, seq_idx=None)
    assert asked == [5]
    parts = [
        reference(*part, causal(n, n, 3))
        for n, part in zip(lengths, zip(*(tensor.split(lengths, 2) for tensor in (q, k, v)), strict=True), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(parts, 1))


ROWS = {f"{row.name}, {row.provider}": row for row in BACKENDS}


@pytest.mark.parametrize("label", ROWS)
def test_every_backend_is_in_its_row(label: str) -> None:
    """Its callables are there; where a CPU (or a stand-in for its kernel) can run it, packed samples are as alone."""
    row = ROWS[label]
    assert callable(named(row.mask))
    assert callable(named(row.kernel or row.attend))
    assert bool(row.kernel) != bool(row.attend)
    if not row.varlen or not ("cpu" in row.kinds or row.kernel):
        return
    routes = (Choice(value, "the test says so") for value in (row.name, row.provider, row.varlen, "none"))
    attend = attention_callable(
        AttentionPlan(*routes, (), "cast"), FlashAttention(KERNELS[row.provider]) if row.kernel else None
    )
    config = LlamaConfig(hidden_size=4 * D, num_attention_heads=4, num_key_value_heads=2, head_dim=D)
    layer, lengths = LlamaAttention(config, 0), [5, 4, 3]
    q, k, v = operands(1, 12)
    packed, _ = attend(layer, q, k, v, None, scaling=D**-0.5, cu_seq_lens_q=torch.tensor([0, 5, 9, 12]), max_length_q=5)
    for out, *part in zip(packed.split(lengths, 1), *(one.split(lengths, 2) for one in (q, k, v)), strict=True):
        torch.testing.assert_close(out, reference(*part, causal(part[0].shape[2], part[0].shape[2])))
    q.grad = None
    packed[:, 5:].sum().backward()
    assert not q.grad[:, :, :5].any()
    assert not k.grad[:, :, :5].any()


def test_values_shorter_than_keys(flash: FlashAttention) -> None:
    q, k, v = operands(1, 6)
    short = v[..., :4]
    out, _ = flash.batch(Layer(), q, k, short, None)
    torch.testing.assert_close(out, reference(q, k, short, causal(6, 6)))


def test_softcap_where_the_kernel_has_it_and_refusals_where_not() -> None:
    q, k, v = operands(1, 6)
    capped, _ = FlashAttention(KERNELS["flash_attn"]).batch(Layer(), q, k, v, None, softcap=0.5)
    scores = 0.5 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * D**-0.5 / 0.5)
    weights = scores.masked_fill(~causal(6, 6), -torch.inf).softmax(-1)
    torch.testing.assert_close(capped, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))
    by_torch = FlashAttention(KERNELS["torch"])
    with pytest.raises(ModelError, match="soft-capping"):
        by_torch.batch(Layer(), q, k, v, None, softcap=0.5)
    with pytest.raises(ModelError, match="attention dropout"):
        by_torch.batch(Layer(), q, k, v, None, dropout=0.1)
    with pytest.raises(ModelError, match="attention sinks"):
        by_torch.batch(Layer(), q, k, v, None, s_aux=torch.zeros(4))


def test_padding_is_found_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    original = torch.Tensor.nonzero
    monkeypatch.setattr(torch.Tensor, "nonzero", lambda self: found.append(1) or original(self))
    flash = FlashAttention(KERNELS["torch"])
    q, k, v = operands(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    for _ in range(4):
        flash.batch(Layer(), q, k, v, mask)
    assert len(found) == 1
    flash.batch(Layer(), q, k, v, mask.clone())
    assert len(found) == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_the_package_is_told_whether_gradients_must_be_the_same_each_time(wanted: bool) -> None:
    heard: list[bool] = []

    def kernel(q: torch.Tensor, *_: Any, deterministic: bool = False, **__: Any) -> torch.Tensor:
        heard.append(deterministic)
        return q

    q = torch.zeros(1, 2, 4, D)
    try:
        set_rounding(False, wanted)
        FlashAttention(flash_attn_varlen(kernel)).batch(Layer(), q, q, q, None)
    finally:
        set_rounding(False, False)
    assert heard == [wanted]
