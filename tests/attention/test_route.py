"""Which attention backend is taken on which machine, and why not the others."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from halftune.attention.backends import BACKENDS
from halftune.attention.contract import AttentionPlan
from halftune.attention.route import route_attention
from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.config.sections.model import AttentionSection, LoraAdapter, PrecisionSection
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.precision.resolve import resolve_precision

BASE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300, "head_dim": 64}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
FLASH = {"flash-attn": "2.8.3"}


def model(model_type: str = "llama", **extra: Any) -> ModelFacts:
    return facts_from_config({**BASE, "model_type": model_type, **extra}, "here")


def route(
    machine: str,
    backend: str = "auto",
    *,
    facts: ModelFacts | None = None,
    packing: bool = False,
    packages: dict[str, str] | None = None,
    compute: str = "auto",
    linear: str = "auto",
) -> AttentionPlan:
    hardware, facts = lookup(machine, packages), facts or model()
    precision = resolve_precision(PrecisionSection.model_validate({"compute": compute}), hardware, facts, LoraAdapter())
    section = AttentionSection.model_validate({"backend": backend, "linear": linear})
    return route_attention(section, hardware, facts, precision.compute.value, packing)


AUTO = [
    # machine, packing, packages → softmax, provider, varlen
    ("a100", False, {}, ("fa2", "torch", "none")),
    ("a100", False, {"torch": "2.9.1"}, ("sdpa", "torch", "none")),
    ("a100", True, {}, ("fa2", "torch", "torch_varlen")),
    ("a100", True, {"torch": "2.9.1"}, ("sdpa", "torch", "segments")),
    ("a100", True, {"torch": "2.11.0+cu128"}, ("fa2", "torch", "torch_varlen")),
    ("a100", True, {"flash-attn-3": "3.0.0"}, ("fa2", "torch", "torch_varlen")),
    ("rtx5090", True, {"flash-attn-4": "4.0.0"}, ("fa2", "torch", "torch_varlen")),
    ("a100", False, FLASH, ("fa2", "flash_attn", "none")),
    ("a100", True, FLASH, ("fa2", "flash_attn", "flash_attn_varlen")),
    ("h200", True, {"flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0"}, ("fa3", "flash_attn_3", "flash_attn_3_varlen")),
    ("h200", True, FLASH | {"flash-attn-4": "4.0.0"}, ("fa4", "flash_attn_4", "flash_attn_4_varlen")),
    ("b200", False, {"flash-attn-4": "4.0.0"}, ("fa4", "flash_attn_4", "none")),
    ("rtx5090", True, {}, ("fa2", "torch", "torch_varlen")),
    ("t4", False, FLASH, ("sdpa", "torch", "none")),
    ("t4", True, FLASH, ("sdpa", "torch", "segments")),
    ("p100", True, {}, ("sdpa", "torch", "segments")),
    ("a100+t4", True, FLASH, ("sdpa", "torch", "segments")),
    ("mi300x", True, {}, ("sdpa", "torch", "segments")),
    ("mi300x", True, FLASH, ("fa2", "flash_attn", "flash_attn_varlen")),
    ("max1550", True, FLASH, ("sdpa", "torch", "segments")),
    ("m2", False, {}, ("sdpa", "torch", "none")),
    ("cpu", True, FLASH, ("sdpa", "torch", "segments")),
    ("cpu-amx", False, {}, ("sdpa", "torch", "none")),
]


@pytest.mark.parametrize(("machine", "packing", "packages", "expected"), AUTO)
def test_auto(machine: str, packing: bool, packages: dict, expected: tuple) -> None:
    routed = route(machine, packing=packing, packages=packages)
    assert (routed.softmax.value, routed.provider.value, routed.varlen.value) == expected


@pytest.mark.parametrize("machine", CATALOGUE)
@pytest.mark.parametrize("packing", [True, False])
def test_every_backend_is_taken_or_rejected_with_a_reason(machine: str, packing: bool) -> None:
    routed = route(machine, packing=packing)
    assert len(routed.rejected) == len(BACKENDS) - 1
    assert all(reason for _, reason in routed.rejected)
    names = [name.partition(" ")[0] for name, _ in routed.rejected] + [routed.softmax.value]
    assert sorted(names) == sorted(backend.name for backend in BACKENDS)


def why_not(routed: AttentionPlan, label: str) -> str:
    return dict(routed.rejected)[label]


@pytest.mark.parametrize(
    ("machine", "label", "says"),
    [
        ("t4", "fa2 (flash_attn)", "compute capability ≥ 8.0 (Tesla T4: 7.5)"),
        ("a100+t4", "fa2 (torch)", "compute capability ≥ 8.0 (Tesla T4: 7.5)"),
        ("a100", "fa2 (flash_attn)", "flash-attn is not installed"),
        ("a100", "fa4", "compute capability ≥ 9.0 (NVIDIA A100 80GB: 8.0)"),
        ("cpu", "fa2 (torch)", "runs on CUDA only"),
        ("cpu", "flex", "runs on CUDA only"),
        ("a100", "eager", "fa2 (torch)"),
        ("t4", "eager", "sdpa"),
        ("p100", "fa2 (torch)", "fp32"),
    ],
)
def test_reasons(machine: str, label: str, says: str) -> None:
    assert says in why_not(route(machine), label)


@pytest.mark.parametrize("backend", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("machine", ["a100", "h200", "cpu-amx"])
def test_fp32_and_flash_attention_exclude_each_other(machine: str, backend: str) -> None:
    with pytest.raises(PlanError) as caught:
        route(machine, backend, compute="fp32", packages=FLASH)
    assert caught.value.code == "attention.backend_unavailable"
    assert "precision: fp32" in caught.value.what
    assert caught.value.remedy.split(", ")[:2] == ["use attention: auto", "attention: sdpa"]
    assert "precision: bf16" in caught.value.remedy


@pytest.mark.parametrize(
    ("machine", "backend", "packages", "packing", "says", "remedy"),
    [
        ("t4", "fa2", FLASH, False, "Tesla T4: 7.5", "device"),
        ("cpu-amx", "fa2", FLASH, False, "CUDA", "device"),
        ("a100+t4", "fa2", FLASH, True, "Tesla T4: 7.5", "device"),
        ("a100", "fa2", {"torch": "2.9.1"}, False, "flash-attn is not installed", "install it"),
        ("h100", "fa3", {}, False, "flash-attn-3 is not installed", "install it"),
        ("a100", "fa4", {"flash-attn-4": "4.0.0"}, False, "NVIDIA A100 80GB: 8.0", "device"),
        ("cpu", "flex", {}, False, "runs on CUDA only", "attention: sdpa"),
    ],
)
def test_an_impossible_request_is_an_error_with_ways_out(
    machine: str, backend: str, packages: dict, packing: bool, says: str, remedy: str
) -> None:
    with pytest.raises(PlanError) as caught:
        route(machine, backend, packages=packages, packing=packing)
    assert says in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.remedy.count(",") >= 2, "three ways out"


@pytest.mark.parametrize(
    ("backend", "machine", "packages", "packing"),
    [
        ("fa2", "a100", FLASH, False),
        ("fa2", "a100", {}, True),
        ("fa2", "a100", {}, False),
        ("fa3", "a100", {"flash-attn-3": "3.0"}, True),
        ("fa4", "rtx5090", {"flash-attn-4": "4.0"}, True),
        ("sdpa", "h200", FLASH, True),
        ("eager", "cpu", {}, False),
        ("flex", "a100", {}, False),
        ("flex", "a100", FLASH, True),
    ],
)
def test_a_possible_request_is_honoured(backend: str, machine: str, packages: dict, packing: bool) -> None:
    routed = route(machine, backend, packages=packages, packing=packing)
    assert (routed.softmax.value, routed.softmax.reason) == (backend, "asked for")


def test_models_that_need_more_than_plain_attention() -> None:
    softcap, sinks = model("gemma2"), model("gpt_oss")
    assert route("a100", facts=softcap).softmax.value == "flex"
    assert route("a100", facts=softcap, packages=FLASH).softmax.value == "fa2"
    assert route("cpu", facts=softcap).softmax.value == "eager"
    assert route("a100", facts=sinks, packages=FLASH).softmax.value == "flex"
    assert route("t4", facts=sinks).softmax.value == "eager"
    assert route("cpu", facts=sinks).softmax.reason == "the only one with attention sinks on cpu"
    assert "soft-capping" in why_not(route("a100", facts=softcap), "sdpa")
    with pytest.raises(PlanError, match="attention sinks"):
        route("a100", "fa2", facts=sinks, packages=FLASH)
    with pytest.raises(PlanError, match="soft-capping"):
        route("cpu", "sdpa", facts=softcap)


def test_head_sizes() -> None:
    large, odd = model(head_dim=320), model(head_dim=60)
    assert route("h200", facts=large, packing=True, packages=FLASH).softmax.value == "sdpa"
    assert "320" in why_not(route("h200", facts=large, packages=FLASH), "fa2 (flash_attn)")
    assert route("h200", facts=odd, packages=FLASH).softmax.value == "fa2", "the package pads"
    assert route("h200", facts=odd, packing=True).softmax.value == "sdpa", "torch's kernels do not"
    blackwell = {"flash-attn-4": "4.0"}
    assert route("b200", "fa4", facts=model(head_dim=256), packages=blackwell).softmax.value == "fa4"
    with pytest.raises(PlanError, match="192"):
        route("b200", "fa4", facts=model(head_dim=192), packages=blackwell)


@pytest.mark.parametrize(
    ("machine", "safe"), [("a100", True), ("rtx3090", False), ("rtx4090", False), ("rtx5090", False)]
)
def test_the_silent_hole_of_flash_attention_is_closed(machine: str, safe: bool) -> None:
    facts = model(head_dim=256, attention_dropout=0.1)
    routed = route(machine, facts=facts, packages=FLASH)
    assert (routed.softmax.value == "fa2") is safe
    if not safe:
        assert "no backward kernel" in why_not(routed, "fa2 (flash_attn)")
    assert route(machine, facts=model(head_dim=256), packages=FLASH).softmax.value == "fa2"


def test_dropout_rules_out_what_cannot_drop() -> None:
    routed = route("a100", facts=model(attention_dropout=0.1), packing=True)
    assert routed.softmax.value == "sdpa"
    assert "attention dropout" in why_not(routed, "fa2 (torch)")


def test_families_with_attention_code_of_their_own() -> None:
    routed = route("a100", facts=model("falcon"), packages=FLASH)
    assert routed.softmax.value == "eager"
    assert "its own attention code" in routed.softmax.reason
    assert (routed.provider.value, routed.varlen.value) == ("model", "none")
    with pytest.raises(PlanError, match="packed rows"):
        route("a100", facts=model("falcon"), packing=True)


@pytest.mark.parametrize(
    ("model_type", "machine", "expected"),
    [
        ("llama4_text", "a100", "sdpa"),
        ("axk2", "h200", "sdpa"),
        ("deepseek_v4", "a100", "eager"),
        ("doge", "t4", "sdpa"),
    ],
)
def test_what_the_class_of_transformers_does_not_support(model_type: str, machine: str, expected: str) -> None:
    """Our backends are no names that transformers knows, so it would not refuse them."""
    facts = facts_from_config(CONFIG_MAPPING[model_type]().to_dict(), model_type)
    routed = route(machine, facts=facts, packages=FLASH)
    assert routed.softmax.value == expected
    assert "class" in why_not(routed, "fa2 (flash_attn)")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    ("machine", "packages", "expected"),
    [
        ("cpu", {}, ("eager", "transformers", "segments")),
        ("t4", {}, ("eager", "transformers", "segments")),
        ("a100+t4", {}, ("eager", "transformers", "segments")),
        ("mi300x", {}, ("eager", "transformers", "segments")),
        ("a100", {}, ("flex", "transformers", "block_mask")),
        ("h100", {}, ("flex", "transformers", "block_mask")),
        ("rtx5090", {}, ("flex", "transformers", "block_mask")),
    ],
)
def test_packed_rows_that_flash_attention_does_not_compute(
    machine: str, packages: dict, expected: tuple, family: str
) -> None:
    routed = route(machine, facts=model(family), packing=True, packages=packages)
    assert (routed.softmax.value, routed.provider.value, routed.varlen.value) == expected


def test_soft_capped_rows_are_left_to_the_package_of_flash_attention() -> None:
    routed = route("a100", facts=model("gemma2"), packing=True, packages=FLASH)
    assert routed.varlen.value == "flash_attn_varlen"
    assert route("a100", facts=model("gpt_oss"), packing=True, packages=FLASH).varlen.value == "block_mask"
    dropping = model("gpt_oss", attention_dropout=0.1)
    assert route("a100", facts=dropping, packing=True).softmax.value == "eager"


FLA = {"flash-linear-attention": "0.6.0"}


@pytest.mark.parametrize(
    ("machine", "packages", "expected", "says"),
    [
        ("a100", FLA, "halftune", "Triton kernels"),
        ("a100", {"triton": "3.7.1"}, "halftune", "Triton kernels"),
        ("h200", {**FLA, "triton": "3.6.0"}, "halftune", "verified before training"),
        ("a100", {**FLA, "triton": "3.5.1"}, "fla", "halftune: Triton 3.5.1 is older than 3.6.0"),
        ("h200", {**FLA, "triton": "3.5.1"}, "halftune", "torch's matmuls: Triton 3.5.1 is older"),
        ("t4", FLA, "halftune", "torch's matmuls: Tesla T4: Triton 3.6 to 3.9 emit no tensor-core"),
        ("cpu", FLA, "halftune", "chunked"),
        ("mi300x", FLA, "halftune", "NVIDIA GPU"),
    ],
)
def test_linear_layers(machine: str, packages: dict, expected: str, says: str) -> None:
    routed = route(machine, facts=model("qwen3_5_text", **LINEAR), packages=packages)
    assert routed.linear.value == expected
    assert says in routed.linear.reason


def test_linear_layers_on_request() -> None:
    hybrid = model("qwen3_5_text", **LINEAR)
    assert route("a100", facts=hybrid, packages=FLA, linear="torch").linear.value == "torch"
    assert route("a100", facts=hybrid, packages=FLA, linear="fla").linear.value == "fla"
    assert route("a100", facts=hybrid, linear="halftune").linear.value == "halftune"
    with pytest.raises(PlanError, match=r"wrong gradients on NVIDIA H200 with Triton 3.6.0 \(fixed in 3.7.1\)"):
        route("h200", facts=hybrid, packages={**FLA, "triton": "3.6.0"}, linear="fla")
    for machine, says in (("t4", "no tensor-core instructions"), ("cpu", "requires CUDA"), ("mi300x", "requires CUDA")):
        with pytest.raises(PlanError, match=says):
            route(machine, facts=hybrid, packages=FLA, linear="fla")
    with pytest.raises(PlanError, match="not installed"):
        route("a100", facts=hybrid, linear="fla")
    with pytest.raises(PlanError, match=r"flash-linear-attention 0.1.9 is older than 0.2.2"):
        route("a100", facts=hybrid, packages={"flash-linear-attention": "0.1.9"}, linear="fla")
    assert route("a100", linear="fla").linear.value == "none"
    with pytest.raises(PlanError, match="bamba"):
        route("a100", facts=model("bamba"), packages=FLA, linear="fla")


@pytest.mark.parametrize(
    ("machine", "variable", "value", "says"),
    [
        ("a100", "HALFTUNE_KERNELS", "rubbish", "HALFTUNE_KERNELS is 'rubbish'"),
        ("a100", "HALFTUNE_KERNELS_GATED_DELTA_RULE", "x", "HALFTUNE_KERNELS_GATED_DELTA_RULE is 'x'"),
        ("cpu", "HALFTUNE_KERNELS", "triton", "HALFTUNE_KERNELS=triton"),
        ("cpu", "HALFTUNE_KERNELS_MAMBA2", "torch", "HALFTUNE_KERNELS_MAMBA2"),
    ],
)
def test_what_the_environment_cannot_ask_for(
    machine: str, variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    hybrid = model("qwen3_5_text", **LINEAR)
    with pytest.raises(PlanError, match=says) as refused:
        route(machine, facts=hybrid)
    assert refused.value.remedy == f"unset {variable}"
    assert route(machine, facts=hybrid, linear="torch").linear.value == "torch"
    assert route(machine).linear.value == "none"


def test_what_the_environment_asks_for_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from halftune.attention.linear import _OPERATORS, IMPLEMENTATIONS, runs_in_torch
    from halftune_kernels.dispatch import NAMES, OPERATORS

    assert set(IMPLEMENTATIONS) == {*NAMES, "auto"}
    assert _OPERATORS == OPERATORS
    hybrid = model("qwen3_5_text", **LINEAR)
    assert not runs_in_torch(lookup("a100"), hybrid)
    monkeypatch.setenv("HALFTUNE_KERNELS", "torch")
    assert route("a100", facts=hybrid).linear.reason.endswith(", HALFTUNE_KERNELS=torch")
    assert runs_in_torch(lookup("a100"), hybrid)


def test_every_operator_is_asked_for_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from halftune.attention.linear import runs_in_torch

    hybrid = model("qwen3_5_text", **LINEAR)
    monkeypatch.setenv("HALFTUNE_KERNELS_CAUSAL_CONV1D", "torch")
    assert not runs_in_torch(lookup("a100"), hybrid)  # its scan does not
    monkeypatch.setenv("HALFTUNE_KERNELS", "torch")
    monkeypatch.setenv("HALFTUNE_KERNELS_GATED_DELTA_RULE", "triton")
    assert not runs_in_torch(lookup("a100"), hybrid)
    both = "HALFTUNE_KERNELS_CAUSAL_CONV1D=torch, HALFTUNE_KERNELS_GATED_DELTA_RULE=triton"
    assert route("a100", facts=hybrid).linear.reason.endswith(f", {both}")
    monkeypatch.setenv("HALFTUNE_KERNELS_GATED_DELTA_RULE", "rubbish")
    with pytest.raises(PlanError, match="HALFTUNE_KERNELS_GATED_DELTA_RULE is 'rubbish'"):
        route("a100", facts=hybrid)


def test_heads_of_rwkv7_that_nothing_computes() -> None:
    with pytest.raises(PlanError, match="head_dim 512"):
        route("cpu", facts=model("rwkv7", hidden_size=1024, head_dim=512))


@pytest.mark.parametrize("linear", ["auto", "halftune", "fla", "torch"])
def test_every_rejected_backend_of_linear_layers_has_its_reason(linear: str) -> None:
    routed = route("a100", facts=model("qwen3_5_text", **LINEAR), packages=FLA, linear=linear)
    assert {routed.linear.value} | {name for name, _ in routed.rejected_linear} == {"halftune", "fla", "torch"}
    assert routed.linear.value not in {name for name, _ in routed.rejected_linear}
    assert all(reason for _, reason in routed.rejected_linear)


def test_layers_without_a_way_in_keep_their_own_code() -> None:
    routed = route("cpu", facts=model("jamba"))
    assert routed.linear.value == "torch"
    assert "jamba" in routed.linear.reason
    with pytest.raises(PlanError, match="minimax"):
        route("cpu", facts=model("minimax"), linear="halftune")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_5_text", "linear_key_head_dim"),
        ("bailing_hybrid", "head_dim"),
        ("mamba2", "state_size"),
        ("nemotron_h", "ssm_state_size"),
        ("falcon_h1", "mamba_d_state"),
    ],
)
def test_heads_that_our_operators_do_not_take_are_left_to_transformers(kind: str, name: str) -> None:
    for size, left in ((256, False), (512, True)):
        routed = route("cpu", facts=model(kind, **{**LINEAR, name: size}))
        assert (routed.linear.value == "torch") == left
        assert (f"{name} {size}" in routed.linear.reason) == left


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_mamba", "rwkv7", "xlstm"])
@pytest.mark.parametrize("machine", ["cpu", "a100"])
def test_a_model_without_attention_says_so(machine: str, kind: str) -> None:
    routed = route(machine, facts=model(kind))
    assert (routed.softmax.value, routed.provider.value, routed.varlen.value) == ("eager", "model", "none")
    assert f"no layer of {kind} has softmax attention" in routed.softmax.reason
    with pytest.raises(PlanError, match=f"sdpa is unavailable: no layer of {kind}"):
        route(machine, "sdpa", facts=model(kind))


def test_fla_is_not_asked_to_be_installed_where_it_could_not_run() -> None:
    with pytest.raises(PlanError, match="no tensor-core instructions for Tesla T4") as refused:
        route("t4", facts=model("qwen3_5_text", **LINEAR), linear="fla")
    assert "install" not in refused.value.remedy
