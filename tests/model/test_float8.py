"""Frozen weights in float8: the numbers that GPUs multiply, emulated; layers fused and not; loss curves beside bf16."""

from __future__ import annotations

import copy
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_fused_layers import adapted
from tiny_model import because, plan
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.model.files.builtin import materialize
from halftune.model.fused import fuse
from halftune.model.load.float8 import Float8Linear, round_to_float8
from halftune_kernels.library import everywhere
from halftune_kernels.ops.float8_linear import fits, float8_linear, quantised
from halftune_kernels.ops.float8_rows import quantise_rows
from halftune_kernels.ops.float8_rows.reference import reference

BF16 = torch.bfloat16


def in_float8(model: nn.Module) -> int:
    made = plan()
    return round_to_float8(model, replace(made, precision=replace(made.precision, linear=because("fp8"))))


def made_of(rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What float8 values and the scales of rows stand for, in fp64."""
    values, scales = rows
    return values.double() * scales.double()


def test_weights_are_rounded_where_they_are_computed_with() -> None:
    layer, device = nn.Linear(32, 16), torch.device("meta")
    found = Float8Linear(layer, device)
    assert {one.device for one in (found.values, found.scales)} == {device}
    assert layer.weight.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
def test_the_products_are_those_of_rounded_rows(dtype: torch.dtype) -> None:
    """Forward, and the gradient of the input: the weight's scales round the incoming gradient with it."""
    weight, bias = torch.randn(48, 80, dtype=torch.float64) * torch.rand(48, 1) * 3, torch.randn(48).double()
    x, grad = torch.randn(7, 80, dtype=dtype, requires_grad=True), torch.randn(7, 48, dtype=dtype)
    made = quantised(weight)
    out = float8_linear(x, made, bias.to(dtype))
    out.backward(grad)
    exact = reference(weight)
    assert (made.values.double() * made.scales - exact).norm() <= 1e-6 * exact.norm()
    # from the rows as they were rounded: a quotient of bf16 numbers may lie in the middle of two float8 numbers, and
    # go to either by the rounding of the division
    truth = made_of(quantise_rows(x.detach())) @ exact.t() + bias.to(dtype).double()
    unscaled = exact / made.scales.double()
    back = made_of(quantise_rows(grad, made.scales.view(-1))) @ unscaled
    bound = 4e-3 if dtype == BF16 else 1e-6
    assert x.grad is not None
    for found, expected in ((out, truth), (x.grad, back)):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= bound * expected.norm()


def test_rounding_costs_what_three_bits_cost() -> None:
    weight, x = torch.randn(64, 256), torch.randn(32, 256)
    exact = x @ weight.t()
    error = float((float8_linear(x, quantised(weight)) - exact).norm() / exact.norm())
    assert 0.02 < error < 0.05, error  # uniform in a step of 1/8 to 1/16 of the number, of both factors


def test_rows_of_zeros_and_values_that_are_none_stay() -> None:
    weight = quantised(torch.randn(16, 32))
    x = torch.zeros(2, 32)
    x[1, 3] = float("nan")
    out = float8_linear(x, weight)
    assert out[0].eq(0).all()
    assert out[1].isnan().all()


def test_sizes_that_are_no_multiples_of_16_keep_their_weight() -> None:
    model = get_peft_model(
        nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32)),
        LoraConfig(r=2, target_modules=["0", "1", "2"]),
    )
    assert in_float8(model) == 1
    assert not fits((32, 24))
    assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 1
    assert not any("values" in name or "scales" in name for name in model.state_dict())


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_fused_layers_compute_what_single_layers_compute(kind: str) -> None:
    """Query, key and value on one rounded input, and feed-forward layers; in fp32, where both round alike."""
    model = adapted(kind, {"intermediate_size": 64}, "sdpa")
    assert in_float8(model) > 0
    ids = torch.arange(18).view(2, 9)

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    own = trained()
    with everywhere():
        done = fuse(model)
        try:
            assert done.fused["adapted linear layers"] >= 4, str(done)
            assert done.fused["feed-forward layers"] == 2, str(done)
            found = trained()
        finally:
            done.remove()
    assert len(found) == len(own)
    for ours, expected in zip(found, own, strict=True):
        # an fp32 sum in another order lands on the other side of a float8 tie now and then
        assert (ours - expected).norm() <= 2e-2 * expected.norm()


STEPS, TOKENS = 20, 64


def steps(model: Any, ids: torch.Tensor, rate: float) -> list[float]:
    """Losses of a text that is learnt by heart, under autocast to bf16."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", BF16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_the_loss_falls_as_in_bf16() -> None:
    """LoRA on the builtin model, which has learnt one text, on another one: with frozen weights in bf16 and in float8,
    the losses of a step are at most 2 % of the first one apart."""
    folder = materialize("qwen2-tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = (
        torch.tensor(tokenizer(str(module.__doc__) * 4)["input_ids"][:TOKENS])[None]
        for module in (copy, textwrap.TextWrapper)
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    steps(model, first, 3e-3)
    curves = []
    for in_what in ("bf16", "fp8"):
        torch.manual_seed(1)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned = get_peft_model(copy.deepcopy(model).to(BF16), lora, autocast_adapter_dtype=True)
        assert in_what == "bf16" or in_float8(tuned) >= 14
        curves.append(steps(tuned, second, 1e-3))
    bf16, fp8 = curves
    assert bf16[-1] < 0.7 * bf16[0]
    apart = max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) / bf16[0]
    assert 0 < apart < 0.02, (apart, bf16, fp8)
