"""RWKV-7's fp32 vectors in fp16-mixed: ``k.addcmul(k * (a - 1), k_a)`` promotes k, ``k_k`` promotes a and b."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halftune.attention.contract import EntryPoint
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.doctor import inputs
from halftune.doctor.trace_model import trace_model
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.precision.guard import Guard
from halftune.precision.rebind import Scope

OPERANDS = ("r", "k", "v", "a", "b")
ENTRY = EntryPoint("", "chunk_rwkv7", OPERANDS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_raw_operator_refuses(source, cuda_autocast, dtype: torch.dtype) -> None:
    model = source("rwkv7_mixer").Mixers()
    with cuda_autocast(dtype), pytest.raises(AssertionError) as caught:
        model(torch.randn(2, 5, 32))
    assert str(caught.value).startswith(f"q: {dtype}, k: torch.float32, v: {dtype}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_guarded_it_trains(source, cuda_autocast, dtype: torch.dtype) -> None:
    module = source("rwkv7_mixer")
    torch.manual_seed(0)
    model = module.Mixers()
    guard = Guard("cast", "fp16" if dtype == torch.float16 else "bf16")
    x = torch.randn(2, 5, 32)
    with Scope({module.chunk_rwkv7: guard.operator(module.chunk_rwkv7, OPERANDS)}), cuda_autocast(dtype):
        model(x).float().square().mean().backward()
    assert guard.report()["casts"] == 2
    assert guard.report()["sites"][0]["arrived"].startswith(f"r {guard.compute}, k fp32, v {guard.compute}")
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.dtype == torch.float32


def test_the_lines_are_named(source, traced, line_of) -> None:
    found = traced(source("rwkv7_mixer").Mixers, lambda: torch.randn(2, 5, 32), linear=(ENTRY,))
    by_operand = {finding.operand: finding for finding in found}
    assert sorted(by_operand) == ["a", "b", "k"]
    k = by_operand["k"]
    assert k.file.endswith("tests/seeds/rwkv7_mixer.py")
    assert k.line == line_of("rwkv7_mixer", "promotes k")
    assert k.op == "addcmul(fp16, fp16, fp32)"
    assert k.cause == "type promotion, fp32 from parameter layers.0.k_a"
    assert (k.site, k.layers) == ("layers.*", {"train": 2})
    assert "k_k" in by_operand["a"].cause
    assert by_operand["a"].op == "mul(fp16, fp32)"


def test_all_in_fp32_without_autocast_is_legal_there() -> None:
    seen = []

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q.dtype, k.dtype, v.dtype))
        return q

    guard = Guard("strict", "bf16")
    guard.operator(rule)(*[torch.randn(1, 2, 2, 4)] * 3)
    assert seen == [(torch.float32,) * 3]


def test_the_doctor_looks_at_the_operands_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "TOKENS", 4)  # the operator is run in full
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({**BUILTIN_MODELS["rwkv7-tiny"], **sizes}))
    recipe = {
        "model": {"name_or_path": str(tmp_path), "tokenizer": "builtin:qwen2-tiny"},
        "precision": "bf16",
        "adapter": "none",
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": "run"},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(recipe))
    config = load_config(tmp_path / "x.yaml").run
    found = trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))
    assert found.calls == {"linear attention, train": 2, "linear attention, chat": 4}
    assert found.violations == []
