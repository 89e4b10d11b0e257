"""Packed rows sample by sample equal a dense block-diagonal mask, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from halftune.attention.segments import band_mask, segment_attention
from halftune.core.errors import ModelError

LENGTHS = [7, 1, 300, 33]
TOTAL = sum(LENGTHS)


def bounds(lengths: list[int] | None = None) -> torch.Tensor:
    return torch.tensor([0, *(lengths or LENGTHS)]).cumsum(0).to(torch.int32)


def operands(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """As models make them: [1, T, H, D] seen as [1, H, T, D]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, TOTAL, count, 8, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def visible(window: int | None, causal: bool = True) -> torch.Tensor:
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    position = torch.arange(TOTAL)
    distance = position[:, None] - position
    seen = sample[:, None] == sample
    if causal:
        seen &= distance >= 0
    return seen if window is None else seen & (distance < window)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None):
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 128, 200, 299, 300, 4096])
def test_equals_a_dense_mask_with_gradients(window: int | None, kv_heads: int) -> None:
    own, reference = operands(kv_heads=kv_heads), operands(kv_heads=kv_heads)
    out = segment_attention(nn.Identity(), *own, bounds(), sliding_window=window, scaling=0.3)
    expected = dense(*reference, visible(window), 0.3)
    assert out.shape == (1, TOTAL, 4, 8)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(own, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_without_causality_samples_still_do_not_mix() -> None:
    own = operands()
    out = segment_attention(nn.Identity(), *own, bounds(), is_causal=False)
    torch.testing.assert_close(out, dense(*own, visible(None, causal=False)))
    with pytest.raises(ModelError, match="sliding windows"):
        segment_attention(nn.Identity(), *own, bounds(), is_causal=False, sliding_window=4)


def test_samples_of_no_length_are_left_out() -> None:
    own = operands()
    with_empty = torch.tensor([0, 7, 7, 8, 308, TOTAL, TOTAL])
    torch.testing.assert_close(
        segment_attention(nn.Identity(), *own, with_empty), segment_attention(nn.Identity(), *own, bounds())
    )


def test_a_row_that_the_boundaries_do_not_cover_is_refused() -> None:
    with pytest.raises(ModelError, match="the samples of the packed row have"):
        segment_attention(nn.Identity(), *operands(), bounds([7, 1]))


class Softcapped(Gemma2Attention):
    """Its eager function, found through the file of its base class, caps the scores."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_key_value_groups = 2


def test_softcap_by_the_models_own_function() -> None:
    q, k, v = operands(dtype=torch.float32)
    out = segment_attention(Softcapped(), q, k, v, bounds(), eager=True, softcap=1.5, scaling=1.0, sliding_window=20)
    scores = 1.5 * torch.tanh((q @ k.repeat_interleave(2, 1).transpose(2, 3)) / 1.5)
    weights = scores.masked_fill(~visible(20), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), rtol=1e-5, atol=1e-5)


class WithSinks(GptOssAttention):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_key_value_groups = 2
        self.sinks = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))


def test_sinks_by_the_models_own_function() -> None:
    q, k, v = operands(dtype=torch.float32)
    module = WithSinks()
    out = segment_attention(module, q, k, v, bounds(), eager=True, scaling=0.5, s_aux=module.sinks)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.5).masked_fill(~visible(None), -torch.inf)
    sink = module.sinks.reshape(1, 4, 1, 1).expand(1, 4, TOTAL, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_model_without_an_eager_function_is_refused() -> None:
    with pytest.raises(ModelError, match="Identity has no eager_attention_forward"):
        segment_attention(nn.Identity(), *operands(), bounds(), eager=True)


def test_any_square_of_a_band_mask_is_a_shorter_mask() -> None:
    mask = band_mask(300, 4, torch.float32, torch.device("cpu"))
    assert mask.shape[-1] >= 300
    short = mask[0, 0, :9, :9]
    expected = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)
    assert torch.equal(short == 0, expected)
    assert (short[~expected] == torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [False, True])
def test_matches_each_sample_alone_to_the_bit(dtype: torch.dtype, blocks: bool, monkeypatch) -> None:
    monkeypatch.setattr("halftune.attention.segments._MEAN_IN_BLOCKS", 0 if blocks else TOTAL)
    q, k, v = operands(dtype=dtype)
    out = segment_attention(nn.Identity(), q, k, v, bounds())
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        one = (q[:, :, part], k[:, :, part], v[:, :, part])
        if blocks:
            alone = segment_attention(nn.Identity(), *one, bounds([length])).transpose(1, 2)
        else:
            alone = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        assert torch.equal(out[:, part], alone.transpose(1, 2))
        start += length
