"""Our operators stand where transformers' layers call theirs, in this version of transformers, and can be removed."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from test_linear_packing import FAMILIES, model_of, relative, since
from tiny_model import because, plan

from halftune.core.errors import DtypeContractError, ModelError
from halftune.model.attention.linear import boundaries, route_linear_layers, routed_linear_layers
from halftune.model.attention.packing_check import packed_row
from halftune.model.attention.register import current_guard, registered_attention
from halftune.model.load.load import recompute_activations
from halftune.plan import Plan

_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_KDA = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
_SCAN = ("mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined", "mamba2_selective_state_update")
GLOBALS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"), _DELTA),
    **dict.fromkeys(("kimi_linear", "glm5_next", "bailing_hybrid"), _KDA),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h"), _SCAN),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ()),
}


def a_plan(linear: str, guard: str = "cast") -> Plan:
    made = plan()
    return replace(made, attention=replace(made.attention, linear=because(linear), guard=guard))


@pytest.mark.parametrize("family", GLOBALS)
def test_the_globals_exist_in_this_transformers(family: str) -> None:
    """An upgrade that renames one must fail here, not fall back in silence."""
    since(family)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name in (*GLOBALS[family], "causal_conv1d_fn", "causal_conv1d_update"):
        assert callable(vars(module)[name])


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "mamba2", "lfm2", "bamba"])
def test_every_function_is_rebound_and_comes_back(family: str) -> None:
    model = model_of(family)
    stem = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{stem}.modeling_{stem}")
    names = (*GLOBALS[stem], "causal_conv1d_fn", "causal_conv1d_update")
    before = {name: vars(module)[name] for name in names}
    with registered_attention(a_plan("halftune")), routed_linear_layers(model, a_plan("halftune")):
        assert all(vars(module)[name] is not before[name] for name in names)
    assert all(vars(module)[name] is before[name] for name in names)


def test_two_models_of_a_family_call_what_their_own_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alive in one process, in any order, and in a backward pass that computes a part of the forward again."""
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    own, ids, calls = module.torch_chunk_gated_delta_rule, torch.randint(3, 96, (1, 9)), list[str]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("own")
        return own(*args, **kwargs)

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", counted)
    models = {}
    for linear in ("halftune", "torch"):
        models[linear] = model_of("qwen3_5_text").train()
        with registered_attention(a_plan(linear)):
            route_linear_layers(models[linear], a_plan(linear))
    recompute_activations(models["halftune"])
    for linear, other in (("halftune", "torch"), ("torch", "halftune"), ("halftune", "torch")):
        calls.clear()
        logits = models[linear](ids, use_cache=False).logits
        assert bool(calls) == (linear == "torch")
        models[other](ids, use_cache=False)
        calls.clear()
        logits.square().mean().backward()
        assert not calls, "recomputed by what was computed first"
    assert module.torch_chunk_gated_delta_rule is counted, "outside of a model nothing is replaced"
    plain = model_of("qwen3_5_text")
    plain(ids, use_cache=False)
    assert calls, "a model that nobody has routed is transformers' own"


def test_torch_is_torch_where_a_package_is_installed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers decides at its import: with fla there, its own function calls fla's, which may be known for wrong
    gradients on this GPU."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    model, ids = model_of("qwen3_5_text").eval(), torch.randint(3, 96, (1, 9))
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    truth = model(ids, use_cache=False).logits

    def no(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> None:
        raise AssertionError("fla was called")

    package: Any = ModuleType("fla")
    package.__spec__, package.chunk_gated_delta_rule = ModuleSpec("fla", None), no
    package.__path__ = []
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, package)
    inner = module.torch_chunk_gated_delta_rule.__wrapped__
    preferring = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(inner)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", preferring)
    with pytest.raises(AssertionError, match="fla was called"):
        model(ids, use_cache=False)
    with registered_attention(a_plan("torch")), routed_linear_layers(model, a_plan("torch")):
        assert torch.equal(model(ids, use_cache=False).logits, truth)
        with pytest.raises(ModelError, match="does not support packed rows"):
            model(ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 4, 9], dtype=torch.int32))
    assert module.torch_chunk_gated_delta_rule is preferring


def test_code_that_calls_none_of_our_functions_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """As that of a checkpoint with code of its own, whose name is that of a family that is routed."""
    with registered_attention(a_plan("halftune")):
        route_linear_layers(torch.nn.Linear(2, 2), a_plan("halftune"))
    assert "does not call backend halftune" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "mamba2", "bamba", "lfm2"])
def test_generation_with_a_cache_is_transformers_own(family: str) -> None:
    model = model_of(family).eval()
    ids = torch.randint(3, 96, (2, 9))

    def answer() -> Any:
        settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
        return model.generate(ids, **settings, return_dict_in_generate=True, eos_token_id=None, use_cache=True)

    own = answer()
    with registered_attention(a_plan("halftune")), routed_linear_layers(model, a_plan("halftune")):
        ours = answer()
    assert torch.equal(own.sequences, ours.sequences)
    assert max(relative(a, b) for a, b in zip(ours.logits, own.logits, strict=True)) < 1e-5


def test_boundaries_under_every_name() -> None:
    bounds, numbers = torch.tensor([0, 3]), torch.tensor([[0, 0, 0]])
    assert boundaries({"cu_seq_lens_q": bounds, "seq_idx": numbers}) == {"cu_seqlens": bounds}
    assert boundaries({"cu_seqlens": bounds, "cu_seq_lens_q": None}) == {"cu_seqlens": bounds}
    assert boundaries({"seq_idx": numbers}) == {"seq_idx": numbers}
    assert boundaries({"cu_seqlens": None}) == {}


def test_strays_are_cast_or_refused_by_the_guard() -> None:
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    model = model_of("qwen3_5_text")
    q, v, g = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)
    given = {"query": q.bfloat16(), "key": q, "value": v.bfloat16(), "g": g, "beta": torch.rand(1, 5, 2)}
    with registered_attention(a_plan("halftune")), routed_linear_layers(model, a_plan("halftune")):
        out, _ = module.torch_chunk_gated_delta_rule(**given)
        assert out.dtype == torch.bfloat16
    strict = a_plan("halftune", "strict")
    refused = pytest.raises(DtypeContractError, match="key fp32")
    with registered_attention(strict), routed_linear_layers(model, strict), refused:
        module.torch_chunk_gated_delta_rule(**given)


@pytest.mark.parametrize("name", ["mamba2_chunk_scan", "mamba2_selective_state_update"])
def test_strays_before_the_scan_are_cast_and_steps_and_states_left_alone(name: str) -> None:
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    model = model_of("mamba2")
    half, state = torch.bfloat16, torch.zeros(1, 2, 4, 8)
    x, b, dt, a = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 1, 8), torch.rand(1, 5, 2), -torch.rand(2)
    given: tuple[Any, ...] = (x.to(half), dt, a, b, b.to(half))
    if name == "mamba2_chunk_scan":
        given = (*given, 4)
    else:
        given = (state, *(each[:, 0] if each.ndim > 1 else each for each in given))
    with registered_attention(a_plan("halftune")), routed_linear_layers(model, a_plan("halftune")):
        out = vars(module)[name](*given)
        assert out.dtype == half
        (site,) = current_guard().report()["sites"]
        assert site["arrived"] == "hidden_states bf16, B fp32, C bf16"
    assert (name == "mamba2_chunk_scan") or state.abs().sum() > 0, "the caller's own fp32 state was updated in place"
    strict = a_plan("halftune", "strict")
    refused = pytest.raises(DtypeContractError, match="B fp32")
    with registered_attention(strict), routed_linear_layers(model, strict), refused:
        vars(module)[name](*given)


def test_a_wrong_argument_is_an_error_of_ours() -> None:
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    model = model_of("qwen3_5_text")
    q, g = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)
    made, refused = (
        a_plan("halftune"),
        pytest.raises(ModelError, match="cu_seqlens is from 0 to 4, expected from 0 to T"),
    )
    with registered_attention(made), routed_linear_layers(model, made), refused:
        module.torch_chunk_gated_delta_rule(q, q, q, g, g.exp(), cu_seqlens=torch.tensor([0, 4]))


def test_every_family_that_is_routed_is_tested() -> None:
    from halftune.config.facts.families import FAMILIES as KNOWN

    routed = {name for name, family in KNOWN.items() if family.operators}
    assert GLOBALS.keys() | {"rwkv7"} == routed  # our own model calls the operators by itself
    assert {family.removesuffix("_text") for family in FAMILIES} == {
        name for name, family in KNOWN.items() if family.packs
    }


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "mamba2", "lfm2", "rwkv7"])
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    """With more than one chunk and more than one sample in the row."""
    model, ids = model_of(family).train(), torch.randint(3, 96, (1, 80))
    results = []
    with registered_attention(a_plan("halftune")), routed_linear_layers(model, a_plan("halftune")):
        for recompute in (False, True):
            model.zero_grad()
            if recompute:
                recompute_activations(model)
            logits = model(**packed_row(ids, (70, 10)), use_cache=False).logits
            logits.square().mean().backward()
            results.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(results[0]) == len(results[1])
    assert all(relative(a, b) < 1e-5 for a, b in zip(results[1], results[0], strict=True))
