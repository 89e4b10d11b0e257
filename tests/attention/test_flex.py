"""Flex attention of packed rows: its block masks are torch's, its results those of a dense mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo.config as settings
from test_varlen_segments import LENGTHS, TOTAL, bounds, operands, visible
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from halftune.attention import flex
from halftune.core.errors import ModelError

FIELDS = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Flex attention as it is compiled, computed by torch's formulas, which it keeps from CPUs with gradients."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()

    def compiled(backend: Any) -> None:
        graph = torch.compile(torch_flex.flex_attention, backend=backend, fullgraph=True)
        monkeypatch.setattr(flex, "kernel", lambda: graph)

    compiled("eager")
    return compiled


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7, 130, 300])
def test_block_masks_are_torchs(window: int | None, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for most in (3, 40, 500):
        lengths = torch.randint(0, most, (6,), generator=generator).tolist()  # samples of no length too
        for row in ([*lengths, 1], [1], [127, 1], [128, 129, 128]):
            total = sum(row)
            made = flex.row_mask(bounds(row), total, window, causal=causal).blocks
            expected = torch_flex.create_block_mask(made.mask_mod, 1, None, total, total, device="cpu")
            assert all(torch.equal(getattr(made, field), getattr(expected, field)) for field in FIELDS)
            assert (made.seq_lengths, made.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)


@pytest.mark.parametrize(
    ("window", "causal", "softcap", "with_sinks"),
    [(None, True, None, False), (20, True, 1.5, True), (200, True, None, True), (None, False, 1.5, False)],
)
def test_equals_a_dense_mask_with_gradients(
    window: int | None, causal: bool, softcap: float | None, with_sinks: bool, graph: Any
) -> None:
    own, reference = operands(), operands()
    sinks = [torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    given = {"s_aux": sinks[0] if with_sinks else None, "softcap": softcap, "sliding_window": window}
    out = flex.FlexRows().row(
        nn.Identity(), *own, cu_seq_lens=bounds(), longest=max(LENGTHS), scaling=0.7, is_causal=causal, **given
    )
    q, k, v = reference
    scores = q @ k.repeat_interleave(2, 1).mT * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(window, causal), -torch.inf)
    if with_sinks:
        scores = torch.cat([scores, sinks[1].view(1, 4, 1, 1).expand(1, 4, TOTAL, 1)], -1)
    expected = (scores.softmax(-1)[..., :TOTAL] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    pairs = [*zip(own, reference, strict=True), *([sinks] if with_sinks else [])]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_sinks_round_half_formats_once(graph: Any) -> None:
    """The sums of exponentials stay in fp32: rounded to bf16, as in transformers, they would cost several percent."""
    q, k, v = (part.detach().bfloat16() for part in operands())
    sinks = torch.tensor([20.0, 16.0, 24.0, 12.0], dtype=torch.bfloat16)
    given = {"cu_seq_lens": bounds(), "longest": max(LENGTHS), "scaling": 3.0}
    with_sinks = flex.FlexRows().row(nn.Identity(), q, k, v, s_aux=sinks, **given)
    without = flex.FlexRows().row(nn.Identity(), q, k, v, **given)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT * 3.0).masked_fill(~visible(None), -torch.inf)
    factor = torch.sigmoid(scores.logsumexp(-1) - sinks.double()[:, None]).transpose(1, 2)[..., None]
    assert with_sinks.dtype == torch.bfloat16
    torch.testing.assert_close(with_sinks.double(), without.double() * factor, rtol=1.01 * 2**-8, atol=0)


def test_a_mask_is_made_once_for_all_layers_of_a_kind(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(side_effect=flex.row_mask)
    monkeypatch.setattr(flex, "row_mask", made)
    rows, row = flex.FlexRows(), bounds()
    for cu in (row, row.clone()):
        for window in (None, 20, None, max(LENGTHS), 20):
            rows.row(nn.Identity(), *operands(), cu_seq_lens=cu, longest=max(LENGTHS), sliding_window=window)
    assert [call.args[2] for call in made.call_args_list] == [None, 20] * 2


@pytest.mark.nightly
def test_lengths_and_windows_compile_a_bounded_number_of_kernels(graph: Any) -> None:
    counter = CompileCounter()
    graph(counter)
    rows = flex.FlexRows()

    def run(*lengths: int, grad: bool) -> None:
        total = sum(lengths)
        q, k, v = (torch.randn(1, total, n, 16).transpose(1, 2).requires_grad_(grad) for n in (4, 2, 2))
        for window in (None, 3, 40):
            cu, longest = bounds(list(lengths)), max(lengths)
            rows.row(nn.Identity(), q, k, v, cu, longest, sliding_window=window, softcap=9.0, s_aux=torch.zeros(4))

    for grad in (True, False):
        for lengths in ((100, 130, 3), (90, 210), (128, 128), (7,), (1,), (127, 1), (129,), (300, 12)):
            run(*lengths, grad=grad)
    assert counter.frame_count <= flex.COMPILATIONS


def test_the_limit_of_recompilations_is_raised_for_flex_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    flex.kernel.cache_clear()
    limit = settings.recompile_limit
    limits: list[int] = []

    def attend(query: torch.Tensor, *_: Any, **__: Any) -> Any:
        flex.kernel()  # compiles where it is called
        limits.append(settings.recompile_limit)
        return query, None

    monkeypatch.setattr(flex, "attend", attend)
    for _ in range(2):
        flex.FlexRows().row(nn.Identity(), *operands(), cu_seq_lens=bounds(), longest=max(LENGTHS))
        limits.append(settings.recompile_limit)
    assert limits == [64, limit] * 2


def test_dropout_is_refused() -> None:
    with pytest.raises(ModelError) as refused:
        flex.FlexRows().row(nn.Identity(), *operands(), cu_seq_lens=bounds(), longest=max(LENGTHS), dropout=0.1)
    assert refused.value.code == "attention.kernel_lacks_feature"
