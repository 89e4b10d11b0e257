"""LoRA on fused experts, multiplied beside their weights: loss and gradients are those of peft's own way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from test_patch_experts import CPU, IDS, SIZES
from tiny_model import plan
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from halftune.model.adapters.low_rank_experts import multiply_beside_weights
from halftune.model.load.load import recompute_activations
from halftune.precision.dtypes import autocast

# gate and up one after the other; transposed, interleaved, with biases; without a gate
FAMILIES = {"mixtral": "gate_up_proj", "qwen3_moe": "gate_up_proj", "gpt_oss": "gate_up_proj", "nemotron_h": "up_proj"}
HYBRID = {"layers_block_type": ["moe", "moe"], "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}
RANK, ALPHA = 3, 5


def adapted(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random LoRA on its experts, in peft's own way."""
    config = AutoConfig.for_model(kind, **SIZES, **(HYBRID if kind == "nemotron_h" else {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager", **changes)
    wanted = [f"experts.{FAMILIES[kind]}", "experts.down_proj"]
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=wanted, use_rslora=True)
    model = get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def step(model: Any, compute: str = "fp32") -> dict[str, torch.Tensor]:
    """The loss and the gradients of all that is trained; nothing else has one."""
    model.zero_grad()
    with autocast(plan(compute, "fp32").precision, CPU):
        logits = model(input_ids=IDS, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
    loss.backward()
    assert all((one.grad is not None) == one.requires_grad for one in model.parameters())
    return {"loss": loss.detach()} | {name: one.grad for name, one in model.named_parameters() if one.requires_grad}


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a tensor."""
    assert found.keys() == wanted.keys()
    return max(error(one, wanted[name]) for name, one in found.items())


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Has entries if peft computes W + B·A."""
    made: list[None] = []
    original = torch.baddbmm

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        made.append(None)
        return original(*args, **options)

    monkeypatch.setattr(torch, "baddbmm", counted)
    return made


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it where float64 is needed, which the grouped kernel does not know: products are made expert by expert."""
    return partial(monkeypatch.setattr, moe, "_can_use_grouped_mm", lambda *_: False)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_and_gradients_are_pefts(
    kind: str, dtype: torch.dtype, bound: float, sums: list[None], loops: Callable[[], None]
) -> None:
    if dtype == torch.float64:
        loops()
    model = adapted(kind, dtype)
    wanted = step(model)
    assert sums
    sums.clear()
    assert multiply_beside_weights(model) == 4
    assert worst(step(model), wanted) < bound
    recompute_activations(model)
    assert worst(step(model.train()), wanted) < bound
    assert not sums


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_in_bf16_a_layer_is_no_further_from_fp64_than_pefts(kind: str, loops: Callable[[], None]) -> None:
    """Of one layer with given experts: a router would choose others for the last bit. B·A is small beside W."""
    torch.manual_seed(0)
    model = adapted(kind, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # in fp32, as trained
            parameter.data = torch.randn(parameter.shape) * (1 / 32 if "lora_B" in name else 1) / 6
    layer = next(one for one in model.modules() if isinstance(one, ParamWrapper))
    hidden, grad = torch.randn(1024, 32).bfloat16(), torch.randn(1024, 32).bfloat16()
    chosen, weights = torch.rand(1024, 4).topk(2).indices, torch.rand(1024, 2).bfloat16()

    def run(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        moved = copy.deepcopy(layer).to(dtype)
        x = hidden.to(dtype, copy=True).requires_grad_()
        out = moved(x, chosen, weights.to(dtype))
        out.backward(grad.to(dtype))
        adapter = {name: one.grad for name, one in moved.named_parameters() if one.grad is not None}
        return {"out": out.detach(), "x": x.grad} | adapter

    theirs = run(torch.bfloat16)
    assert multiply_beside_weights(model) == 4
    ours = run(torch.bfloat16)
    loops()
    exact = run(torch.float64)
    assert len(exact) == 6
    mine, other = ([error(found[name], wanted) for name, wanted in exact.items()] for found in (ours, theirs))
    assert math.hypot(*mine) < 1.1 * math.hypot(*other)  # of a tensor alone, chance decides


def test_under_autocast_products_are_in_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3_moe")
    exact = step(model)
    multiply_beside_weights(model)
    seen: set[torch.dtype] = set()
    original = torch.nn.functional.grouped_mm

    def watched(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update((x.dtype, weight.dtype))
        return original(x, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watched)
    rounded = step(model, "bf16")
    assert seen == {torch.bfloat16}
    assert {one.dtype for name, one in rounded.items() if name != "loss"} == {torch.float32}
    assert 1e-4 < worst(rounded, exact) < 0.1


def test_other_adapters_none_and_merged_ones_are_pefts(sums: list[None]) -> None:
    model, ids = adapted("qwen3_moe"), {"input_ids": IDS, "use_cache": False}
    lora = copy.deepcopy(model.peft_config["default"])
    model.add_adapter("other", lora)
    reference = copy.deepcopy(model)
    assert multiply_beside_weights(model) == 4
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for active in (["default"], ["other"], ["default", "other"]):
            for one in (reference, model, copied):
                one.base_model.set_adapter(active)
            sums.clear()
            wanted = reference(**ids).logits
            assert bool(sums) == (len(active) == 1)  # peft adds up two by another function
            sums.clear()
            assert error(model(**ids).logits, wanted) < 1e-5
            assert error(copied(**ids).logits, wanted) < 1e-5
            assert not sums
        with reference.disable_adapter(), model.disable_adapter():
            assert torch.equal(model(**ids).logits, reference(**ids).logits)
        model.base_model.set_adapter("default")
        kept = model(**ids).logits
        assert error(model.merge_and_unload()(**ids).logits, kept) < 1e-5


def test_a_loop_over_experts_stays_pefts(sums: list[None], caplog: pytest.LogCaptureFixture) -> None:
    model = adapted("qwen3_moe", experts_implementation="eager")
    with caplog.at_level("INFO", "halftune"):
        assert multiply_beside_weights(model) == 0
    assert len(caplog.records) == 1
    step(model)
    assert sums
    routed = adapted("qwen3_moe")
    assert multiply_beside_weights(routed) == 4
    wanted = step(routed)
    routed.set_experts_implementation("batched_mm")  # as transformers does for decoding
    sums.clear()
    assert worst(step(routed), wanted) < 1e-5
    assert sums
