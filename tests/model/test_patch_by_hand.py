"""Functions of flash_attn that a model calls by hand: the guard also refuses what the kernel gets wrong in silence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from standins.flash import flash_attn_installed
from tiny_model import plan

from halftune.core.errors import DtypeContractError, ModelError
from halftune.model.attention import register as patch
from halftune.model.attention.register import guarded_imports, registered_attention


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """flash_attn's function behind the guard, on what says that it is an RTX 3090."""
    with flash_attn_installed() as pretend, registered_attention(plan("bf16")):
        pretend.capability = (8, 6)
        monkeypatch.setattr(patch, "capability_of", lambda tensor: (8, 6))
        with guarded_imports() as scope:
            assert "flash_attn.flash_attn_func" in scope.names
            yield importlib.import_module("flash_attn").flash_attn_func


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


@pytest.mark.parametrize("given", ["by position", "by name"])
def test_what_goes_beside_a_cache_is_brought_into_its_format(attend: Callable, given: str) -> None:
    cached = importlib.import_module("flash_attn").flash_attn_with_kvcache
    k_cache, v_cache = torch.zeros(1, 8, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 8, 2, 8, dtype=torch.bfloat16)
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    v = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    options = {"causal": True, "cache_seqlens": 0}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if given == "by name":
            out = cached(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, **options)
        else:
            out = cached(q, k_cache, v_cache, k, v, **options)
        assert torch.equal(out, attend(q, k, v, causal=True))
    assert torch.equal(k_cache[:, :4], k.bfloat16()), "the model's own cache is written"
    arrived = [site["arrived"] for site in patch.current_guard().report()["sites"]]
    assert arrived[0] == "q fp32, k fp32, v bf16"


def test_caches_in_a_long_format_are_refused(attend: Callable) -> None:
    cached = importlib.import_module("flash_attn").flash_attn_with_kvcache
    half, wide = torch.zeros(1, 8, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 8, 2, 8)
    with pytest.raises(DtypeContractError, match="flash_attn_with_kvcache got k_cache fp32, v_cache bf16, q bf16"):
        cached(half, wide, half)
    with pytest.raises(DtypeContractError, match="caches in bf16"):
        cached(wide, wide, wide)


def test_the_module_of_flash_attn_3_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None):  # as in flash-attn 3
        assert q.dtype == k.dtype == v.dtype
        return q

    module = ModuleType("flash_attn_interface")
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    with registered_attention(plan("bf16")), guarded_imports() as scope:
        assert "flash_attn_interface.flash_attn_func" in scope.names
        q = torch.randn(1, 4, 2, 8)
        assert vars(module)["flash_attn_func"](q, q.bfloat16(), q, 0.5).dtype == torch.bfloat16
    assert vars(module)["flash_attn_func"] is flash_attn_func
