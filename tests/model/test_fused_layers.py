"""Fused layers train as the model's own code does, family by family, and leave alone what they do not know."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from test_packing_hybrids import config_of
from tiny_model import because, nll_sum, plan
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.model.attention.linear import routed_linear_layers
from halftune.model.attention.packing_check import packed_row, small_copy
from halftune.model.attention.register import registered_attention
from halftune.model.fused import FusedLayers, fuse, projections

LENGTHS = (70, 9, 130)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# family → config changes, and the numbers of layers: norms, feed-forward, adapted linear
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "llama": ({}, (5, 2, 8)),
    "qwen2": ({}, (5, 2, 8)),
    "qwen3": ({}, (9, 2, 8)),
    "mistral": ({"sliding_window": 16}, (5, 2, 8)),
    "gemma3_text": (SLIDING, (13, 0, 14)),  # its activation is gelu
    "phi3": ({"sliding_window": 16}, (5, 2, 4)),
    "gpt_oss": ({**SLIDING, **EXPERTS}, (5, 0, 8)),
    "qwen3_moe": (EXPERTS, (9, 0, 8)),
}
KINDS = ("norms", "feed-forward layers", "adapted linear layers")


@contextlib.contextmanager
def hybrid(family: str) -> Iterator[Any]:
    """A small model of a family with our operators, for a packed row."""
    made = plan()
    route = replace(made.attention, linear=because("halftune"))
    made = replace(made, attention=route, batch=replace(made.batch, packing=because(True)))
    torch.manual_seed(0)
    model = small_copy(config_of(family)).train()
    with registered_attention(made) as name, routed_linear_layers(model, made):
        model.set_attn_implementation(name)
        yield model


@pytest.fixture
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    made = plan()
    if request.node.name.endswith("[gpt_oss]"):  # sinks, which sdpa lacks
        made = replace(made, attention=replace(made.attention, softmax=because("eager")))
    with registered_attention(replace(made, batch=replace(made.batch, packing=because(True)))) as name:
        yield name


def adapted(kind: str, changes: dict[str, Any], attention: str, **lora: Any) -> Any:
    """A tiny model with an adapter that has an effect and norms that are not all ones."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        kind, **{**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "pad_token_id": 0, **changes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **lora}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()


def batch() -> dict[str, Any]:
    ids = torch.randint(3, 128, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, ::3] = -100
    return {**packed_row(ids, LENGTHS), "labels": labels}


def trained(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a packed row."""
    model.zero_grad()
    loss = nll_sum(model, batch())
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[float, dict[str, torch.Tensor]], own: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(own[0], rel=1e-5)
    assert found[1].keys() == own[1].keys()
    for name, gradient in own[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def counts(done: FusedLayers) -> tuple[int, ...]:
    return tuple(done.fused[kind] for kind in KINDS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_the_same(kind: str, attention: str) -> None:
    changes, expected = FAMILIES[kind]
    model = adapted(kind, changes, attention)
    names, own = list(model.state_dict()), copy.deepcopy(trained(model))
    done = fuse(model)
    assert counts(done) == expected, str(done)
    assert list(model.state_dict()) == names
    assert_same(trained(model), own)
    done.remove()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "nemotron_h", "bamba", "olmo_hybrid"])
def test_a_hybrid_trains_the_same(family: str) -> None:
    """All its weights, in a packed row."""
    with hybrid(family) as model:
        model.requires_grad_(True)
        own = copy.deepcopy(trained(model))
        done = fuse(model)
        assert done.fused["gated norms"] == sum("NormGated" in type(module).__name__ for module in model.modules()) > 0
        assert not any("gated norm" in reason for reason in done.left), str(done)
        assert_same(trained(model), own)


@pytest.mark.parametrize(
    ("family", "first", "size"), [("qwen3_5_text", "in_proj_qkv", 4), ("qwen3_next", "in_proj_qkvz", 2)]
)
def test_projections_of_a_delta_rule_are_computed_together(
    family: str, first: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[nn.Module]] = []
    compute = projections._compute

    def counted(x: torch.Tensor, layers: Any) -> Any:
        computed.append(list(layers))
        return compute(x, layers)

    with hybrid(family) as whole:
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        model = get_peft_model(whole, LoraConfig(task_type="CAUSAL_LM", **options)).train()
        own = copy.deepcopy(trained(model))
        fuse(model)
        monkeypatch.setattr(projections, "_compute", counted)
        assert_same(trained(model), own)
        parts = [module for module in model.modules() if first in dict(module.named_children())]
    assert parts
    for part in parts:
        calls = [
            layers
            for layers in computed
            if any(layer.forward.__self__.group.layers[0] is getattr(part, first) for layer in layers)
        ]
        assert [len(layers) for layers in calls] == [size]


def test_bf16_under_autocast_is_as_near_to_fp64_as_the_own_code(attention: str) -> None:
    """Over several models: the error of one is a matter of luck."""
    errors = {"own": 0.0, "fused": 0.0}
    for seed in range(4):
        model = adapted("qwen2", {}, attention)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False  # as in training: autocast brings the formats together
        _, exact = trained(copy.deepcopy(model).double())
        for code in errors:
            done = fuse(model) if code == "fused" else None
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, gradients = trained(model)
            assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
            assert done is None or counts(done) == (5, 2, 8)
            errors[code] += sum(float((gradients[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
    assert 0 < errors["fused"] <= errors["own"]


def test_gradient_checkpointing_changes_nothing(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)
    own = copy.deepcopy(trained(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(trained(model), own)


UNUSUAL = [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True, "bias": "none"}]


@pytest.mark.parametrize("lora", UNUSUAL, ids=str)
def test_unusual_adapters_keep_their_own_code(lora: dict[str, Any], attention: str) -> None:
    model = adapted("qwen2", {}, attention, **lora)
    torch.manual_seed(3)
    own = copy.deepcopy(trained(model))
    done = fuse(model)
    assert counts(done) == (5, 0, 0)
    assert done.left["adapted linear layers with unsupported parts"] == 14
    torch.manual_seed(3)
    assert_same(trained(model), own)


def test_what_becomes_unusual_later_runs_by_its_own_code(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)

    def loss() -> float:
        with torch.no_grad():
            return float(nll_sum(model, batch()))

    whole = loss()
    with model.disable_adapter():
        base = loss()
    assert abs(base - whole) > 1e-3 * whole
    model.merge_adapter()
    assert loss() == pytest.approx(whole, rel=1e-5)
    model.unmerge_adapter()
    seen: list[nn.Module] = []
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    layer.register_forward_hook(lambda module, _inputs, _output: seen.append(module))
    assert loss() == pytest.approx(whole, rel=1e-5)
    assert seen == [layer]
    assert type(model.merge_and_unload()).__name__ == "Qwen2ForCausalLM"


def test_trained_base_weights_keep_their_own_code(attention: str) -> None:
    model = adapted("qwen2", {}, attention).merge_and_unload().requires_grad_(True)
    own = copy.deepcopy(trained(model))
    done = fuse(model)
    assert counts(done) == (5, 0, 0)
    assert_same(trained(model), own)


def test_why_a_layer_keeps_its_own_code(attention: str) -> None:
    """That it could not be compared is another reason than that it computes something else."""
    model = adapted("qwen2", {}, attention)
    first, second = (module for module in model.modules() if type(module).__name__ == "Qwen2MLP")

    class Refusing(type(first)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such format\nbut others")

    class Doubling(type(first)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    first.__class__, second.__class__ = Refusing, Doubling
    done = fuse(model)
    assert done.left == {
        "feed-forward layers that could not be compared: RuntimeError: no such format (Refusing)": 1,
        "feed-forward layers that compute something else, off by 0.5 (Doubling)": 1,
    }
    assert all(reason in str(done) for reason in done.left)


def test_a_layer_with_dropout_of_its_own_keeps_it(attention: str) -> None:
    """It shows in training only."""
    model = adapted("qwen2", {}, attention)
    first = next(module for module in model.modules() if type(module).__name__ == "Qwen2MLP")

    class Dropping(type(first)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(super().forward(x), 0.1, self.training)

    first.__class__ = Dropping
    before = torch.get_rng_state()
    done = fuse(model)
    assert done.fused["feed-forward layers"] == 1
    assert "forward" not in vars(first)
    assert first.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_norm_that_may_have_a_gate() -> None:
    """Mamba-2's has one in its model; without, its own code runs."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", vocab_size=64, **sizes))
    done = fuse(model)
    assert done.fused == {"norms": 2, "gated norms": 1}  # the block's and the last one
    assert not done.left
    gated: Any = next(module for module in model.modules() if type(module).__name__ == "MambaRMSNormGated")
    x, gate = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    own = type(gated)
    torch.testing.assert_close(gated(x), own.forward(gated, x))
    torch.testing.assert_close(gated(x, gate=gate), own.forward(gated, x, gate))
    assert type(gated(x, gate).grad_fn.next_functions[0][0]).__name__ == "_GatedNormBackward"
    assert type(gated(x).grad_fn).__name__ == "MulBackward0"


GATED = {
    "qwen3_5": {}, "qwen3_next": {}, "qwen3_5_moe": {}, "qwen4_exp": {}, "olmo_hybrid": {}, "kimi_linear": {},
    "bailing_hybrid": {}, "glm5_next": {}, "mamba2": {"group_size": 8}, "nemotron_h": {"group_size": 8},
    "bamba": {"group_size": 16}, "granitemoehybrid": {"group_size": 32}, "zamba2": {"group_size": 4},
    "falcon_h1": {"n_groups": 4, "norm_before_gate": False},
}  # fmt: skip


@pytest.mark.parametrize("before", [True, False])
def test_the_order_of_norm_and_gate(before: bool) -> None:
    assert_gated("falcon_h1", {"n_groups": 2, "norm_before_gate": before}, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("weight", "dtype"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("family", GATED)
def test_gated_norms(family: str, weight: torch.dtype, dtype: torch.dtype) -> None:
    assert_gated(family, GATED[family], weight, dtype)


def assert_gated(family: str, options: dict[str, Any], weight: torch.dtype, dtype: torch.dtype) -> None:
    """A family's gated norm is recognised, and gives its layer's result and gradients, in its dtype."""
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = next(value for name, value in vars(file).items() if name.endswith("RMSNormGated"))
    layer = made(32, **options).to(weight)
    torch.manual_seed(5)
    nn.init.normal_(layer.weight)
    results = []
    given = torch.randn(2, 1, 7, 32).to(dtype)
    for code in ("own", "fused"):
        done = fuse(nn.Sequential(layer)) if code == "fused" else FusedLayers()
        assert done.fused["gated norms"] == (code == "fused")
        x, gate = (one.clone().requires_grad_() for one in given)
        out = layer(x, gate)
        gradients = torch.autograd.grad(out.double().square().sum(), (x, gate, layer.weight))
        results.append((out.detach(), *gradients))
        done.remove()
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    for own, found in zip(*results, strict=True):
        assert (found.dtype, found.shape) == (own.dtype, own.shape)
        assert (found - own).norm() <= allowed * own.norm()
