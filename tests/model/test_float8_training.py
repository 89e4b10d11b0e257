"""Trained linear layers in float8 by torchao: errors against fp64, and which layers are chosen."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import because, plan
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.model.float8_layers import use_float8
from halftune.precision import TRAINED_FLOAT8

pytest.importorskip("torchao")
# e4m3 has three bits of mantissa: a number of its normal range moves by 2⁻⁴ of itself at most (arXiv:2209.05433,
# section 3). A scale of a power of two takes the largest number of a row to between 224 and 448; what is below 2⁻⁶
# then moves by 2⁻¹⁰ at most.
NORMAL, SUBNORMAL, LARGEST = 2.0**-4, 2.0**-10, 224.0


class OfLayers(nn.Sequential):
    """Layers that look like a model."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.config = AutoConfig.for_model("qwen2")

    def get_output_embeddings(self) -> None:
        """No head."""


def in_float8(model: Any, keep_fp32: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The layers that torchao computes, by name."""
    made = plan()
    precision = replace(made.precision, linear=because(TRAINED_FLOAT8), keep_fp32=because(keep_fp32))
    use_float8(model, replace(made, precision=precision), emulate=True)
    return {name: one for name, one in model.named_modules() if type(one).__name__ == "Float8Linear"}


def rounded(factor: torch.Tensor, dim: int) -> torch.Tensor:
    """A factor in e4m3, in fp64, with a power of two as the scale of each row along ``dim``, which is summed over."""
    largest = factor.double().abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (factor.double() * scale).to(torch.float8_e4m3fn).double() / scale


def bound_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How far each element of ``a @ b`` may move where both are rounded along the inner dimension."""
    a, b = a.double().abs(), b.double().abs()
    moved_a = NORMAL * a + SUBNORMAL / LARGEST * a.amax(1, keepdim=True)
    moved_b = NORMAL * b + SUBNORMAL / LARGEST * b.amax(0, keepdim=True)
    return moved_a @ b + a @ moved_b + moved_a @ moved_b


def test_the_three_products_of_a_layer() -> None:
    """Those of rounded rows, and no element is further from fp64 than rounding moves it; 21 rows are no multiple of
    16."""
    x, grad = torch.randn(3, 7, 64) * torch.rand(7, 1) * 5, torch.randn(3, 7, 48)
    model = OfLayers(nn.Linear(64, 48))
    assert list(in_float8(model)) == ["0"]
    layer, given = model[0], x.clone().requires_grad_()
    out = layer(given)
    out.backward(grad)
    assert given.grad is not None
    weight, bias, x, grad = layer.weight.detach(), layer.bias.detach(), x.flatten(0, 1), grad.flatten(0, 1)
    products = (
        (out.detach().flatten(0, 1) - bias, x, weight.t()),
        (given.grad.flatten(0, 1), grad, weight),
        (layer.weight.grad, grad.t(), x),
    )
    for found, a, b in products:
        expected = rounded(a, 1) @ rounded(b, 0)
        assert (found.double() - expected).norm() <= 1e-6 * expected.norm()
        exact = a.double() @ b.double()
        assert ((found.double() - exact).abs() <= bound_of(a, b) + 1e-6 * exact.norm()).all()
        assert (found.double() - exact).norm() > 0.01 * exact.norm()  # it was rounded
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_of_a_model(dtype: torch.dtype) -> None:
    """A factor that is rounded moves by 2⁻³ / √12 · √(3 / (8 ln 2)) of its norm: uniformly in steps of 2⁻³ of numbers
    in [1, 2), which are as likely at each scale. A product has two such factors; errors of products in a row are
    independent, and at most all of them lie before a gradient."""
    torch.manual_seed(0)
    model = tiny("qwen2")
    exact = copy.deepcopy(model).double()
    layers = in_float8(model)
    product = math.sqrt(2) * 2**-3 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
    allowed = product * math.sqrt(3 * len(layers))
    ids = torch.arange(40).view(2, 20) % 37

    def losses(one: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16 and one is model):
            loss = one(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    found, expected = losses(model), losses(exact)
    assert abs(found - expected) <= product * expected
    for (name, ours), truth in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert ours.grad is not None
        assert truth.grad is not None
        error = (ours.grad.double() - truth.grad).norm() / truth.grad.norm()
        assert 1e-3 < error <= allowed, (name, float(error), allowed)


def tiny(kind: str, **changes: Any) -> Any:
    """A random model of hidden size 64."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": False, "pad_token_id": 0}
    known = BUILTIN_MODELS.get(f"{kind}-tiny", {"model_type": kind})
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**known, **sizes, **changes}), dtype=torch.float32)


def leaves(layers: dict[str, nn.Module]) -> set[str]:
    return {name.rpartition(".")[2] for name in layers}


DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_parameters_are_the_same_ones_under_the_same_names() -> None:
    model = tiny("qwen2")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    layers = in_float8(model)
    assert leaves(layers) == DENSE  # without the head
    assert len(layers) == 14
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert set(model.state_dict()) == set(before)


def test_what_keeps_its_format() -> None:
    """Frozen layers, weights that stay fp32, sizes, low-rank sides."""
    model = tiny("qwen2", intermediate_size=132)
    model.model.layers[0].requires_grad_(False)
    layers = in_float8(model, keep_fp32=(r"o_proj\.weight$",))
    assert layers.keys() == {f"model.layers.1.self_attn.{name}_proj" for name in "qkv"}
    assert not in_float8(OfLayers(nn.Linear(1024, 32)))
    assert in_float8(OfLayers(nn.Linear(512, 32)))


def test_routers_keep_their_format() -> None:
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "num_dense_layers": 0}
    model = tiny("afmoe", moe_intermediate_size=32, **experts)
    router = "model.layers.0.mlp.router.gate"
    assert model.get_submodule(router).weight.shape == (16, 64)
    layers = in_float8(model)
    assert router not in layers
    assert "model.layers.0.self_attn.q_proj" in layers


def test_decays_of_linear_attention_keep_their_format() -> None:
    heads = {"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 8}
    kinds = ["linear_attention", "full_attention"]
    model = tiny("qwen3_5", hidden_size=512, layer_types=kinds, **heads)
    layers = in_float8(model)
    assert {"in_proj_qkv", "in_proj_z", "out_proj"} <= leaves(layers)
    assert model.get_submodule(next(iter(layers)).rpartition(".")[0]).in_proj_a.weight.shape == (16, 512)
    assert not leaves(layers) & {"in_proj_a", "in_proj_b", "lm_head"}
