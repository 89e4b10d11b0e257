"""Optimizers: groups, and AdamW with moments of another dtype."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halftune.optim.builtin import AdamWWithStateDtype, by_decay, is_fused


def _descend(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).float().square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def test_fp32_moments_reproduce_torchs_adamw() -> None:
    ours, theirs = _model(torch.float32), _model(torch.float32)
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    mine = AdamWWithStateDtype(
        [{"params": list(ours.parameters()), "weight_decay": 0.1}], **settings, state_dtype=torch.float32
    )
    reference = torch.optim.AdamW(theirs.parameters(), **settings, weight_decay=0.1)
    for a, b in zip(_descend(mine, ours, 50), _descend(reference, theirs, 50), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fp32_moments_of_bf16_weights_stay_fp32_through_save_and_load() -> None:
    model = _model(torch.bfloat16)
    optimizer = AdamWWithStateDtype(model.parameters(), 1e-3, (0.9, 0.999), 1e-8, state_dtype=torch.float32)
    _descend(optimizer, model, 3)
    again = AdamWWithStateDtype(model.parameters(), 1e-3, (0.9, 0.999), 1e-8, state_dtype=torch.float32)
    again.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        before, after = optimizer.state[parameter], again.state[parameter]
        assert after["exp_avg"].dtype == torch.float32
        assert torch.equal(before["exp_avg"], after["exp_avg"])
        assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])
        assert float(after["step"]) == 3


def test_bf16_moments_take_half_the_memory_and_still_learn() -> None:
    model, exact = _model(torch.float32), _model(torch.float32)
    optimizer = AdamWWithStateDtype(model.parameters(), 1e-2, (0.9, 0.99), 1e-8, state_dtype=torch.bfloat16)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    for a, b in zip(_descend(optimizer, model, 100), _descend(reference, exact, 100), strict=True):
        assert (a - b).norm() / b.norm() < 0.05
    assert optimizer.state[next(model.parameters())]["exp_avg"].dtype == torch.bfloat16


def test_vectors_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    matrices, vectors = by_decay(list(model.parameters()), 0.1)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert matrices["weight_decay"] == 0.1
    assert all(p.ndim == 1 for p in vectors["params"])
    assert vectors["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("kinds", "fused"), [(("cpu", "cpu"), True), (("cuda", "cuda"), True), (("cpu", "cuda"), None), (("mps",), None)]
)
def test_updates_are_one_kernel_where_torch_has_it(kinds: tuple[str, ...], fused: bool | None) -> None:
    weights = [SimpleNamespace(device=torch.device(kind)) for kind in kinds]
    assert is_fused([{"params": [weight]} for weight in weights]) is fused


def test_updates_of_bitsandbytes_wait_once_where_state_is_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = pytest.importorskip("halftune.optim.bits_and_bytes")
    waits: list[torch.Tensor] = []
    monkeypatch.setattr(flat, "sync_gpu", waits.append)
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", waits.append)
    model = _model(torch.float32)
    made = flat.FlatAdamW(model.parameters(), lr=1e-2, optim_bits=8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    after = _descend(made, model, 3)
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    assert waits == []
    made.is_paged = True
    made.step()
    assert len(waits) == 1
