"""The number of trained weights, told from names and shapes, against what is made."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter
from tiny_model import plan
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.config.sections.model import AdapterSection, LoraAdapter, NoAdapter
from halftune.core.errors import ConfigError, HalftuneError, PlanError
from halftune.model.adapters import attach_adapter
from halftune.plan.weights import targets
from halftune.plan.weights.train_only import trained_patterns
from halftune.plan.weights.trainable import count_trainable

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0], "head_dim": 16},
    "olmoe": {"model_type": "olmoe", **EXPERTS},
    "qwen3_next": {"model_type": "qwen3_next", **EXPERTS, **LINEAR, "head_dim": 16, "full_attention_interval": 3},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16},
    "qwen3_5": {"model_type": "qwen3_5_text", **LINEAR, "head_dim": 16, "full_attention_interval": 3},
}
DORA_IS_REFUSED = ("qwen3_moe", "qwen3_next")  # linear layers with the names of experts
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "rank 3, two names": {"rank": 3, "target_modules": ["q_proj", "o_proj"]},
    "one expression": {"target_modules": r"model\.layers\.[01]\..*\.(q_proj|k_proj|out_proj)"},
    "dora": {"rank": 4, "use_dora": True},
    "head saved": {"modules_to_save": ["lm_head"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "both saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norms saved": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "modules saved that all-linear would adapt": {"modules_to_save": ["o_proj"]},
    "a layer saved": {"modules_to_save": ["layers.0"]},
    "whatever is in the layers": {"target_modules": r"model\.layers\..*", "modules_to_save": ["lm_head"]},
    "embedding adapted": {"target_modules": ["embed_tokens", "q_proj"]},
}


TYPES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 3},
    "dora": {"type": "lora", "rank": 3, "use_dora": True},
    "oft": {"block_size": 8},
    "vera": {"rank": 8},
    "ia3": {},
    "loha": {"rank": 3},
    "lokr": {"rank": 3},
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "vocab_size": 300}
LATENT = {
    **{"model_type": "deepseek_v3", **SMALL, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2},
}
ON_CONV1D = {"lora", "dora", "vera", "ia3"}
# A kind of target → the model, the targets, and the types that can be there; others are refused by the plan.
KINDS: dict[str, tuple[dict[str, Any], Any, set[str]]] = {
    "linear": ({**SMALL, "model_type": "llama"}, ["q_proj", "down_proj"], {*TYPES}),
    "all-linear": ({**SMALL, "model_type": "llama"}, "all-linear", {*TYPES}),
    "Conv1D": (GPT2, ["c_attn", "mlp.c_proj"], ON_CONV1D),
    "all-linear of Conv1D": (GPT2, "all-linear", ON_CONV1D),
    "an expression of Conv1D": (GPT2, r".*\.c_(attn|fc)", ON_CONV1D),
    "embedding": ({**SMALL, "model_type": "llama"}, ["q_proj", "embed_tokens"], {"lora", "dora"}),
    "embedding alone": ({**SMALL, "model_type": "llama"}, ["embed_tokens"], {"lora", "dora"}),
    "head": ({**SMALL, "model_type": "llama"}, ["q_proj", "lm_head"], {*TYPES}),
    "tied embedding": ({**SMALL, **MODELS["qwen2, tied"]}, ["q_proj", "embed_tokens"], set()),
    "tied head": ({**SMALL, **MODELS["qwen2, tied"]}, ["q_proj", "lm_head"], set()),
    "tied head by an expression": ({**SMALL, **MODELS["qwen2, tied"]}, r".*(q_proj|lm_head)", set()),
    "tied head of Conv1D": (GPT2, ".*", set()),
    # peft's OFT takes inputs of four dimensions for images, and has no DoRA for names of experts
    "latent attention": (LATENT, "all-linear", {*TYPES} - {"oft", "dora"}),
    "router": ({**SMALL, **MODELS["qwen2_moe"]}, ["q_proj", "shared_expert_gate"], {*TYPES}),
}


def made_of(kind: str, type_name: str) -> tuple[dict[str, Any], Any]:
    raw, targets, _ = KINDS[kind]
    given = {"type": type_name, **TYPES[type_name], "target_modules": targets}
    if type_name == "ia3":
        given["feedforward_modules"] = ["down_proj", "mlp.c_proj"]
    return raw, TypeAdapter(AdapterSection).validate_python(given)


def refused_by_plan(facts: ModelFacts, adapter: Any) -> None:
    with pytest.raises(PlanError) as refused:
        count_trainable(facts, adapter)
    codes = ("plan.adapter_unavailable", "config.bad_target_modules", "plan.dora_on_experts")
    assert refused.value.code in codes


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_what_each_type_trains_on_each_kind_of_layer(kind: str, type_name: str) -> None:
    raw, adapter = made_of(kind, type_name)
    facts = facts_from_config(raw, "here")
    if type_name not in KINDS[kind][2]:
        refused_by_plan(facts, adapter)
        return
    adapted = attach_adapter(AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw)), adapter, plan(), 0)
    built = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    counted = count_trainable(facts, adapter)
    assert counted.count.value == counted.adapter == built > 0


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_tied_embedding_that_is_saved_is_one_weight_with_the_head(type_name: str, saved: str) -> None:
    raw = {**SMALL, **MODELS["qwen2, tied"]}
    adapter: Any = TypeAdapter(AdapterSection).validate_python(
        {"type": type_name, **TYPES[type_name], "modules_to_save": [saved]}
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    adapted: Any = attach_adapter(model, adapter, plan(), 0)
    base = adapted.get_base_model()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    assert base.get_output_embeddings().weight.requires_grad
    built = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert count_trainable(facts_from_config(raw, "here"), adapter).count.value == built


def test_ia3_on_inputs_of_some_layers_only() -> None:
    given = {"type": "ia3", "target_modules": ["down_proj"], "feedforward_modules": ["layers.0.mlp.down_proj"]}
    adapter: Any = TypeAdapter(AdapterSection).validate_python(given)
    assert count_trainable(facts_of("llama"), adapter).count.value == 96 + 2 * 64


@pytest.mark.parametrize(
    ("family", "summed"),
    [
        ({"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16}, 0),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16}, 0),
        ({"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "experts_implementation": "batched_mm"}, 0),
        ({"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16, "experts_implementation": "eager"}, 3 * 4 * 48 * 64),
        ({"model_type": "llama4_text", "num_local_experts": 4, "head_dim": 16}, 3 * 4 * 96 * 64),
    ],
)
def test_a_sum_of_weights_and_update_is_counted_where_peft_makes_it(family: dict[str, Any], summed: int) -> None:
    asked = LoraAdapter.model_validate({"rank": 2, "target_parameters": ["experts.down_proj"]})
    facts = facts_from_config({**SMALL, **family}, "here")
    assert count_trainable(facts, asked).summed == summed
    quantised = replace(facts, quantized_experts=True)
    with nullcontext() if not summed else pytest.raises(PlanError) as refused:
        count_trainable(quantised, asked)
    assert not refused or refused.value.code == CONFLICT


CONFLICT, BAD = "config.keys_conflict", "config.bad_target_modules"


@pytest.mark.parametrize(
    ("model_name", "adapter", "code"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["q_proj"]}, CONFLICT),
        ("llama", {"target_modules": r".*_proj", "modules_to_save": ["mlp"]}, CONFLICT),
        ("llama", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}, CONFLICT),
        ("llama", {"target_modules": ["lm_head"], "modules_to_save": ["layers.0", "q_proj"]}, CONFLICT),
        ("llama", {"target_modules": ["lm_head"], "modules_to_save": ["layers"]}, BAD),
        ("llama", {"modules_to_save": ["model"]}, BAD),
        ("llama", {"modules_to_save": ["_proj"]}, BAD),
        ("gpt_oss", {"modules_to_save": ["self_attn"]}, BAD),
        ("gpt_oss", {"target_modules": ".*router", "target_parameters": ["experts.down_proj"]}, BAD),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"], "modules_to_save": ["mlp"]}, CONFLICT),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"], "modules_to_save": ["experts"]}, CONFLICT),
        ("qwen2, tied", {"target_modules": r".*(q_proj|lm_head)"}, "plan.adapter_unavailable"),
        ("qwen2, tied", {"target_modules": ["q_proj", "lm_head"]}, "plan.adapter_unavailable"),
    ],
)
def test_what_peft_refuses_or_cannot_load_again_is_refused(model_name: str, adapter: dict[str, Any], code: str) -> None:
    with pytest.raises(PlanError) as refused:
        count_trainable(facts_of(model_name), LoraAdapter.model_validate(adapter))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("model_name", "adapter", "code"),
    [
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]}, CONFLICT),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"], "modules_to_save": ["mlp"]}, CONFLICT),
        ("qwen2, tied", {"target_modules": r".*(q_proj|lm_head)"}, "plan.adapter_unavailable"),
    ],
)
def test_without_facts_it_is_refused_before_the_first_step(model_name: str, adapter: dict[str, Any], code: str) -> None:
    """The plan does not know the modules of a model that its own code builds."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **MODELS[model_name]}))
    with pytest.raises(HalftuneError) as refused:
        attach_adapter(model, LoraAdapter.model_validate(adapter), plan(), 0)
    assert refused.value.code == code


def facts_of(name: str) -> ModelFacts:
    return facts_from_config({**SMALL, **MODELS[name]}, "here")


@pytest.mark.parametrize("adapter_name", ADAPTERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_lora_counts_are_those_of_the_adapter_that_is_made(model_name: str, adapter_name: str) -> None:
    adapter, facts = LoraAdapter.model_validate(ADAPTERS[adapter_name]), facts_of(model_name)
    if (model_name, adapter_name) == ("qwen2, tied", "embedding adapted"):
        refused_by_plan(facts, adapter)
        return
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **MODELS[model_name]}))
    if adapter_name == "dora" and model_name in DORA_IS_REFUSED:
        with pytest.raises(PlanError, match=r"DoRA on down_proj, gate_proj, up_proj .*target_modules: \[.*q_proj"):
            count_trainable(facts, adapter)
        with pytest.raises(ConfigError, match=r"DoRA on down_proj, gate_proj, up_proj .*target_modules: \[.*q_proj"):
            attach_adapter(model, adapter, plan(), 0)
        return
    adapted = attach_adapter(model, adapter, plan(), 0)
    built = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    counted = count_trainable(facts, adapter)
    assert counted.count.value == built
    assert counted.adapter + counted.saved_whole == built


def test_fused_experts_are_not_adapted() -> None:
    """In transformers 5 experts are three-dimensional parameters: all-linear leaves them frozen."""
    reason = count_trainable(facts_of("mixtral"), LoraAdapter()).count.reason
    assert reason.startswith("LoRA of rank 16 on 12 modules (k_proj, o_proj, q_proj, v_proj); ")
    assert "12%" in reason
    assert "74%" in reason


def test_full_fine_tuning_trains_everything() -> None:
    facts = facts_of("llama")
    assert count_trainable(facts, NoAdapter(type="none")).count.value == facts.num_parameters


@pytest.mark.parametrize("model_name", MODELS)
def test_frozen_parts_are_counted_exactly(model_name: str) -> None:
    adapter, facts = (
        NoAdapter(type="none", train_layers=-1, train_only=("lm_head", r"\.2\.\w+norm\.")),
        facts_of(model_name),
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SMALL, **MODELS[model_name]}))
    counted = count_trainable(facts, adapter)
    attach_adapter(model, adapter, replace(plan(), train_only=trained_patterns(adapter, facts)), 0)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert counted.count.value == sum(trained)
    assert sum(count for _, _, count in counted.tensors) == len(trained)


def test_a_model_whose_own_code_builds_it_is_estimated() -> None:
    facts = facts_from_config({**SMALL, "model_type": "mystery"}, "here", own_code=True)
    counted = count_trainable(facts, LoraAdapter(target_modules=("q_proj",)))
    assert counted.count.value == 3 * 16 * (64 + 64)
    assert "estimated" in counted.count.reason


def test_an_expression_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_EXPRESSION_SECONDS", 0.2)
    with pytest.raises(PlanError) as refused:
        count_trainable(facts_of("llama"), LoraAdapter(target_modules="(([a-z_.0-9]+)+)+!"))
    assert refused.value.code == "config.bad_target_modules"


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ({"target_modules": ["q_prj"]}, "did you mean q_proj"),
        ({"target_modules": ["q_proj", "experts"]}, "no linear layer is named 'experts'"),
        ({"target_modules": "q_proj"}, r"write it as a list: \[q_proj\]"),
        ({"target_modules": ".*nothing"}, "must match a whole name"),
        ({"target_modules": "(q_proj"}, "is not a regular expression"),
        ({"modules_to_save": ["lm_haed"]}, "did you mean lm_head"),
    ],
)
def test_names_that_match_nothing(adapter: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        count_trainable(facts_of("llama"), LoraAdapter.model_validate(adapter))
