"""Grouped experts with fp32 master weights compute in the plan's format, and their gradients are right."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_model import plan
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.model.attention.experts import NAME, route_experts
from halftune.precision.dtypes import autocast

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
IDS = torch.arange(24).reshape(2, 12)
CPU = torch.device("cpu")


def made(kind: str, **changes: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager", **changes)


def gradients(model: torch.nn.Module, compute: str) -> dict[str, torch.Tensor]:
    with autocast(plan(compute, "fp32").precision, CPU):
        logits = model(input_ids=IDS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Dtypes that the grouped matmul is given."""
    dtypes: set[torch.dtype] = set()
    original = torch.nn.functional.grouped_mm

    def watched(x: torch.Tensor, weight: torch.Tensor, **options):
        dtypes.update((x.dtype, weight.dtype))
        return original(x, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    return dtypes


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_fp32_masters_compute_in_bf16_with_right_gradients(kind: str, seen: set[torch.dtype]) -> None:
    exact = gradients(made(kind), "fp32")
    seen.clear()
    gradients(made(kind), "bf16")
    assert seen == {torch.float32}, "transformers alone leaves the plan"
    seen.clear()
    model = made(kind)
    assert route_experts(model, plan("bf16", "fp32")) == 2
    routed = gradients(model, "bf16")
    assert seen == {torch.bfloat16}
    looped = gradients(made(kind, experts_implementation="eager"), "bf16")  # linear layers, which autocast casts
    experts = [name for name in exact if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        assert routed[name].dtype == torch.float32, "gradients return in the master weights' dtype"
        mine, theirs = ((found[name] - exact[name]).norm() / exact[name].norm() for found in (routed, looped))
        assert mine < 2 * theirs, f"{name}: {mine:.1e}, by linear layers under autocast {theirs:.1e}"


def test_without_autocast_nothing_is_touched(seen: set[torch.dtype]) -> None:
    model = made("qwen3_moe")
    assert route_experts(model, plan("fp32")) == 0
    assert model.config._experts_implementation == "grouped_mm"
    routed = made("qwen3_moe")
    route_experts(routed, plan("bf16", "fp32"))
    assert torch.equal(routed(IDS).logits, model(IDS).logits), "outside of autocast, the same numbers"
    assert seen == {torch.float32}


def test_what_is_saved_and_copied_does_not_depend_on_us(tmp_path) -> None:
    model = made("mixtral")
    route_experts(model, plan("bf16", "fp32"))
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    assert torch.equal(copy.deepcopy(model)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("asked", "routed"), [("batched_mm", NAME), ("eager", "eager")])
def test_what_a_checkpoint_asks_for_gives_way_but_a_loop_is_left(
    asked: str, routed: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("qwen3_moe", experts_implementation=asked)
    with caplog.at_level("INFO", "halftune"):
        assert route_experts(model, plan("bf16", "fp32")) == (2 if routed == NAME else 0)
    assert model.config._experts_implementation == routed
    assert f"use {'grouped_mm' if routed == NAME else 'a loop'} in bf16" in caplog.text
