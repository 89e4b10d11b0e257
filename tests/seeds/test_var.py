"""Cosine attention with a learned fp32 scale: fails on the raw kernel, passes guarded, and the lines are named."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from halftune.attention.contract import ENTRY_POINTS
from halftune.core.errors import DtypeContractError
from halftune.precision.guard import Guard
from halftune.precision.patched import patched

F16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_the_raw_kernel_refuses(flash, source, cuda_autocast, dtype: torch.dtype) -> None:
    model = source("var_attention").Blocks()
    with cuda_autocast(dtype), pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 5, 32))
    assert str(caught.value) == "FlashAttention only support fp16 and bf16 data type"


def test_it_cannot_be_seen_under_the_cpus_own_autocast(flash, source) -> None:
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError):
        # the fp32 scale promotes q there, too; k stays half
        source("var_attention").Blocks()(torch.randn(2, 5, 32))
    assert flash.calls == [("flash_attn_func", (torch.float32, BF16, BF16))]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_guarded_it_trains_and_the_cache_works(flash, source, cuda_autocast, dtype: torch.dtype) -> None:
    module = source("var_attention")
    torch.manual_seed(0)
    model = module.Blocks()
    x = torch.randn(2, 5, 32)
    guard = Guard("cast", "fp16" if dtype == F16 else "bf16")
    raw = import_module("flash_attn").flash_attn_func
    with patched(guard, ENTRY_POINTS) as scope, cuda_autocast(dtype):
        assert "seed.modeling_var_attention.flash_attn_func" in scope.names
        model(x).float().square().mean().backward()
        assert {dtypes for _, dtypes in flash.calls} == {(dtype, dtype, dtype)}
        model.blocks[0].caching = True
        with torch.no_grad():
            model(x)
            model(x[:, :1])
    assert module.flash_attn_func is raw, "undone"
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model.blocks[0].scale_mul.grad.dtype == torch.float32
    assert guard.report()["casts"] == 9, "three forwards of three layers"


def test_strict_names_the_site_and_what_arrived(flash, source, cuda_autocast) -> None:
    guard, model = Guard("strict", "fp16"), source("var_attention").Blocks()
    guard.watch(model)
    with patched(guard, ENTRY_POINTS), cuda_autocast(F16), pytest.raises(DtypeContractError) as caught:
        model(torch.randn(2, 5, 32))
    assert "attention computes in fp16 but got q fp32, k fp32, v fp16" in caught.value.what
    assert "tests/seeds/var_attention.py" in caught.value.what


def test_the_lines_are_named(flash, source, traced, line_of) -> None:
    found = traced(source("var_attention").Blocks, lambda: torch.randn(2, 5, 32))
    by_operand = {finding.operand: finding for finding in found}
    assert sorted(by_operand) == ["k", "q"]
    for name, finding in by_operand.items():
        assert finding.file.endswith("tests/seeds/var_attention.py")
        assert finding.line == line_of("var_attention", f"promotes {name}")
        assert (finding.op, finding.becomes) == ("normalize(fp16)", "fp32")
        assert finding.cause == "autocast's fp32 list"
        assert (finding.site, finding.module, finding.layers) == ("blocks.*", "blocks.*", {"train": 3})
        assert finding.passes == ("forward", "backward")
        assert finding.bytes_per_step == 3 * (2 * 5 * 32) * (2 + 4)
