"""Hybrid models, family by family: a packed row gives every sample the logits and gradients that it has alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny_model import because, plan
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.facts.families import family_of
from halftune.config.facts.model import facts_from_config
from halftune.model.attention.linear import routed_linear_layers
from halftune.model.attention.packing_check import packed_row
from halftune.model.attention.register import registered_attention
from halftune.model.files.architectures import own_architectures
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32
from halftune.precision.resolve import keep_fp32

LENGTHS = (11, 1, 70, 6)  # more than one chunk, and a sample of one token
BOUND = 1e-5
# Of every single gradient. In fp32 that of a decay, a sum that nearly cancels, is rounded to some 2e-5 on either side.
BOUND_IN_DOUBLE = 1e-11
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 96, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "tie_word_embeddings": False},
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SCAN = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {**LATENT, **EXPERTS, "linear_num_heads": 4, "linear_head_dim": 16},
    "bailing_hybrid": {**LATENT, **EXPERTS, "num_expert_group": 1},
    "bamba": {**SCAN, "attn_layer_indices": [1], "layer_types": None},
    "falcon_h1": {**SCAN, "mamba_d_ssm": 128, "layer_types": None},
    "granitemoehybrid": {**SCAN, **EXPERTS, "layer_types": ["mamba", "attention", "mamba"]},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "expand": 2},
        **{"layers_block_type": ["mamba", "attention", "mamba"], "layer_types": None},
    },
    "zamba2": {
        **{"n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 16, "mamba_expand": 2, "num_mem_blocks": 1},
        **{"layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "layer_types": None},
        **{"num_key_value_heads": 4, "head_dim": None, "adapter_rank": 8},
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4, "sliding_window": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "expand": 2, "layer_types": None},
    "rwkv7": {
        **dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 8),
        "layer_types": None,
    },
}
OURS = ("rwkv7",)  # transformers has no code for them
# Routed, but its attention chooses keys from the whole row.
UNPACKED: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        **{**DELTA, **EXPERTS, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4},
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    },
}
# Mamba-1 and others keep loops of their own, which know nothing of samples.
LEAKING: dict[str, dict[str, Any]] = {
    "mamba": {"layer_types": None},
    "jamba": {**EXPERTS, "layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax": EXPERTS,
}


class Double(TorchFunctionMode):
    """Computes in fp64 also where a model asks for fp32 by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = [wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
        named = {
            name: wide.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **named)


def since(family: str) -> None:
    """Skips where the installed transformers is older than a family."""
    first = {"lfm3": (5, 23)}.get(family, (0, 0))
    if tuple(map(int, transformers.__version__.split(".")[:2])) < first:
        pytest.skip(f"{family} came with transformers {first[0]}.{first[1]}")


def model_of(family: str) -> Any:
    since(family)
    values = {**SIZES, **{**FAMILIES, **UNPACKED, **LEAKING}[family]}
    with own_architectures():
        config = AutoConfig.for_model(family, **{name: value for name, value in values.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough for a leak to show
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def packed_plan(softmax: str) -> Plan:
    made = plan()
    attention = replace(
        made.attention, softmax=because(softmax), linear=because("halftune"), varlen=because("segments"), guard="off"
    )
    return replace(made, attention=attention, batch=replace(made.batch, packing=because(True)))


@contextmanager
def routed(model: Any) -> Iterator[str]:
    made = packed_plan("sdpa" if model._supports_sdpa else "eager")
    with registered_attention(made) as name, routed_linear_layers(model, made):
        yield name


def loss_of(logits: torch.Tensor, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Sum over samples of the next-token loss inside each."""
    rows = zip(logits.split(lengths, 1), ids.split(lengths, 1), strict=True)
    return torch.stack([F.cross_entropy(a[0, :-1], b[0, 1:], reduction="sum") for a, b in rows if b.shape[1] > 1]).sum()


def packed_and_alone(model: Any, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits, then the gradient of every parameter: of the packed row, and of the samples one by one."""
    ids = torch.randint(3, 96, (1, sum(LENGTHS)))
    results = []
    for packed in (True, False):
        model.zero_grad()
        if packed:
            model.set_attn_implementation(name)
            logits = model(**packed_row(ids, LENGTHS), use_cache=False).logits
        else:
            model.set_attn_implementation("eager")
            parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
            logits = torch.cat(parts, 1)
        loss_of(logits, ids, LENGTHS).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([logits.detach(), *gradients])
    return results[0], results[1]


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm().clamp(min=1e-6))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_alone(family: str) -> None:
    """In fp32 logits and the whole gradient; in fp64 logits and the gradient of each parameter."""
    model = model_of(family).train()
    with routed(model) as name:
        packed, alone = packed_and_alone(model, name)
    assert len(packed) == len(alone) > 10
    assert relative(packed[0], alone[0]) < BOUND
    whole = [torch.cat([gradient.flatten() for gradient in side[1:]]) for side in (packed, alone)]
    assert relative(*whole) < BOUND
    with routed(model.double()) as name, Double():
        packed, alone = packed_and_alone(model, name)
    assert packed[0].dtype == torch.float64
    errors = [relative(a, b) for a, b in zip(packed, alone, strict=True)]
    assert max(errors) < BOUND_IN_DOUBLE, errors


QUICK = ("qwen3_5_text", "kimi_linear", "mamba2", "lfm2")
REST = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in (*QUICK, *OURS)]


@pytest.mark.parametrize("family", [*QUICK, *UNPACKED, *REST])
def test_routed_is_transformers_own(family: str) -> None:
    """One sample alone: our operators give the logits and gradients of transformers' code."""
    model = model_of(family).train().double()
    ids = torch.randint(3, 96, (2, 70))
    results = []
    for ours in (False, True):
        model.zero_grad()
        with Double():
            if ours:
                with routed(model):
                    logits = model(input_ids=ids, use_cache=False).logits
            else:
                logits = model(input_ids=ids, use_cache=False).logits
            logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert max(relative(a, b) for a, b in zip(results[1], results[0], strict=True)) < BOUND_IN_DOUBLE


@pytest.mark.parametrize("family", LEAKING)
def test_layers_with_loops_of_their_own_leak(family: str) -> None:
    """Why these families are refused: were one of them to stop leaking, it could be packed."""
    model = model_of(family).eval()
    ids = torch.randint(3, 96, (1, sum(LENGTHS)))
    row = packed_row(ids, LENGTHS)
    del row["seq_idx"]  # transformers' own convolution refuses it
    with torch.no_grad(), routed(model):
        together = model(**row, use_cache=False).logits
        last = model(input_ids=ids[:, -LENGTHS[-1] :], use_cache=False).logits
    assert relative(together[:, -LENGTHS[-1] :], last) > 1e-3


@pytest.mark.parametrize("family", [family for family in FAMILIES if "ssd" in family_of(family).operators])
def test_what_adds_up_along_a_row_stays_fp32(family: str) -> None:
    model = model_of(family)
    patterns, _ = keep_fp32(facts_from_config(model.config.to_dict(), family))
    names = [name for name, _ in model.named_parameters() if name.endswith((".A_log", ".dt_bias", ".D"))]
    assert {name.rpartition(".")[2] for name in names} == {"A_log", "dt_bias", "D"}
    assert [name for name in names if not stays_fp32(name, None, patterns)] == []
