"""The non-finite watch: names the right module, leaves weights and gradients alone, costs nothing when all is well."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from live_state import live_state
from tiny_model import batch_of
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from halftune.core.choice import Choice
from halftune.core.errors import TrainingError
from halftune.core.manifest import seal
from halftune.model.policy.policy import PolicyModel
from halftune.train.callback import StepMetrics
from halftune.train.loop.nonfinite import MAX_SKIPPED, NonFiniteWatch, check_finite, watch
from halftune.train.state import TrainState

Batch = dict[str, torch.Tensor]


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture
def batch() -> Batch:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.fixture
def run(model: Qwen2ForCausalLM, tmp_path: Path, recipe: Callable[..., tuple[Any, Any]]) -> TrainState:
    loaded, plan = recipe()
    return live_state(config=loaded.run, plan=plan, folder=tmp_path, model=model, step=4)


def spoil(module: nn.Module, factor: float = float("inf")) -> None:
    """Makes a module return ``factor`` times what it would."""
    module.register_forward_hook(lambda _module, _args, output: output * factor)


def rows(part: slice) -> str:
    """Micro-batch number 1, 2 … stands for line 1, 2 … of a file."""
    return ", ".join(f"x.jsonl line {number}" for number in range(1, 9)[part])


def stop(run: TrainState, batches: list[Batch], loss: float = math.nan, norm: float = 1.0) -> str:
    with pytest.raises(TrainingError) as caught:
        check_finite(
            run, loss, norm, list(map(batch_of, batches)), lambda one: PolicyModel(run.model).nll_sum(one), rows
        )
    return str(caught.value)


def test_healthy_step_runs_nothing(run: TrainState, batch: Batch) -> None:
    run.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    check_finite(run, 2.0, 0.5, [batch_of(batch)], lambda one: pytest.fail("the model was run"), rows)


def test_first_module_is_named_and_the_checkpoint_too(run: TrainState, batch: Batch) -> None:
    for step in (2, 4):
        (run.folder / f"checkpoint-{step}").mkdir()
        for name in ("trainable.safetensors", "optimizer.safetensors", "state.json"):
            (run.folder / f"checkpoint-{step}" / name).write_text("{}")
        seal(run.folder / f"checkpoint-{step}")
    spoil(run.model.get_submodule("model.layers.1.mlp.up_proj"))
    words = stop(run, [batch])
    assert "the loss is nan in step 5: the first" in words
    assert "came out of model.layers.1.mlp.up_proj (Linear; float32" in words
    assert f"the weights were not updated, {run.folder / 'checkpoint-4'} is intact" in words
    assert "learning_rate" in words


def test_without_a_checkpoint_it_says_so(run: TrainState, batch: Batch) -> None:
    spoil(run.model.get_submodule("lm_head"))
    assert "there is no checkpoint yet" in stop(run, [batch])


def test_code_between_modules_is_named_by_the_module_around_it(run: TrainState, batch: Batch) -> None:
    mlp: Any = run.model.get_submodule("model.layers.0.mlp")
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x) / 0.0)
    words = stop(run, [batch])
    assert "made in the code of model.layers.0.mlp, on the way to model.layers.0.mlp.down_proj" in words


def test_the_micro_batch_is_named(run: TrainState, batch: Batch) -> None:
    embedding = run.model.get_submodule("model.embed_tokens")
    poisoned = {**batch, "input_ids": batch["input_ids"].clone()}
    poisoned["input_ids"][0, 3] = 63
    healthy = {**batch, "input_ids": batch["input_ids"].clamp(max=62), "labels": batch["labels"].clamp(max=62)}

    def hook(_module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == 63)[..., None], math.nan)

    embedding.register_forward_hook(hook)
    words = stop(run, [healthy, poisoned])
    assert "the first NaN came out of model.embed_tokens" in words
    assert "(micro-batch 2 of 2); it was fed x.jsonl line 2 ·" in words


def test_gradient_that_breaks_in_the_backward_pass(run: TrainState, batch: Batch) -> None:
    norm = run.model.get_submodule("model.layers.1.input_layernorm")
    norm.register_forward_hook(lambda _module, _args, output: _ExplodingGradient.apply(output))
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    for weight in run.model.parameters():
        weight.grad = torch.full_like(weight, 7.0)
    words = stop(run, [batch], loss=2.0, norm=math.inf)
    assert "the gradient norm is inf in step 5: all outputs are finite" in words
    # the explosion stands between the last module of layer 0 and the norm's output
    assert "the first NaN is in a gradient at the output of model.layers.0" in words
    for name, weight in run.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full_like(weight, 7.0))


class _ExplodingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf


def test_weight_that_is_broken_already(run: TrainState, batch: Batch) -> None:
    with torch.no_grad():
        run.model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0, 0] = math.nan
    assert "the weight model.layers.0.self_attn.q_proj.weight is not finite" in stop(run, [batch])


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_broken_frozen_weight_is_the_files_fault(
    run: TrainState, batch: Batch, number: float, compute: Literal["fp32", "fp16"]
) -> None:
    run.plan = replace(run.plan, precision=replace(run.plan.precision, compute=Choice(compute, "test")))
    weight = run.model.get_parameter("model.layers.1.mlp.up_proj.weight").requires_grad_(False)
    weight.data[0, 0] = number
    words = stop(run, [batch])
    assert "learning_rate" not in words
    assert "precision:" not in words
    assert "model.layers.1.mlp.up_proj.weight is frozen" in words


def test_what_does_not_come_back_is_said_so(run: TrainState, batch: Batch) -> None:
    assert "did not come back" in stop(run, [batch])


def test_fp16_is_told_about_its_range(run: TrainState, batch: Batch) -> None:
    spoil(run.model.get_submodule("lm_head"))
    run.plan = replace(run.plan, precision=replace(run.plan.precision, compute=Choice("bf16", "test")))
    assert "bfloat16, largest finite magnitude" not in stop(run, [batch])  # autocast is off: the logits are fp32
    run.plan = replace(run.plan, precision=replace(run.plan.precision, compute=Choice("fp16", "test")))
    assert "precision: bf16 or fp32" in stop(run, [batch])


def test_hooks_are_gone_afterwards(run: TrainState, batch: Batch) -> None:
    stop(run, [batch])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


def test_watch_looks_into_tuples_and_past_masks() -> None:
    class Inner(nn.Module):
        def forward(
            self, x: torch.Tensor, attention_mask: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return x, {"state": x.log()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x, attention_mask=torch.full((1,), -math.inf))

    outer = Outer()
    with watch(outer) as watcher:
        outer(torch.ones(2))
        assert watcher.finding is None
        outer(torch.tensor([1.0, 0.0]))
    assert watcher.finding is not None
    assert (watcher.finding.module, watcher.finding.place, watcher.finding.number) == ("inner", "output", "infinity")
    assert watcher.finding.largest == 0.0


def test_fp16_updates_that_are_all_skipped_end_the_run(run: TrainState) -> None:
    callback = NonFiniteWatch()

    def step(skipped: float) -> None:
        callback.on_step(
            run, StepMetrics(2.0, 1e-4, math.inf, 1, 1, 1, 0.1, 1, {"skipped": skipped, "loss_scale": 6e-5})
        )

    for _ in range(MAX_SKIPPED - 1):
        step(1.0)
    step(0.0)  # one good update starts the count again
    for _ in range(MAX_SKIPPED - 1):
        step(1.0)
    with pytest.raises(TrainingError, match=r"last 30 updates were skipped.*6e-05.*precision: bf16 or fp32"):
        step(1.0)
