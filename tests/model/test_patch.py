"""Our attention in transformers' interface: names, one guard per run, masks, and rows that lost their boundaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import because, plan
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from halftune.core.errors import DtypeContractError, ModelError
from halftune.model.attention.packing_check import packed_row
from halftune.model.attention.qk_dtype import cast_qk_to_compute_dtype
from halftune.model.attention.register import current_guard, register_attention, registered_attention
from halftune.plan import Plan

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def a_plan(softmax: str = "sdpa", *, packing: bool = False, guard: str = "cast", compute: str = "fp32") -> Plan:
    made = plan()
    varlen = "segments" if packing else "none"
    attention = replace(made.attention, softmax=because(softmax), varlen=because(varlen), guard=guard)
    precision = replace(made.precision, compute=because(compute))
    batch = replace(made.batch, packing=because(packing))
    return replace(made, attention=attention, precision=precision, batch=batch)


def a_model(attention: str, kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(autouse=True)
def clean_interface():
    """Tests leave transformers' tables as they found them."""
    with registered_attention(a_plan()):
        yield


def test_names_say_the_backend_and_never_flash() -> None:
    names = {register_attention(a_plan(softmax)) for softmax in ("sdpa", "eager", "flex")}
    assert len(names) == 3
    for name in names:
        assert name.startswith("halftune_")
        assert "flash" not in name
        assert name in AttentionInterface._global_mapping
        assert name in AttentionMaskInterface._global_mapping


def test_each_run_has_its_own_guard_and_agreeing_plans_share_a_name() -> None:
    first = register_attention(a_plan())
    guard = current_guard()
    assert register_attention(a_plan()) == first
    assert current_guard() is not guard
    other = register_attention(a_plan(guard="strict"))
    assert other != first
    assert current_guard().mode == "strict"
    assert register_attention(a_plan(guard="strict")) == other


def test_a_model_keeps_its_behaviour_when_another_run_is_planned() -> None:
    strict = a_model(register_attention(a_plan(guard="strict", compute="bf16")))
    lenient = a_model(register_attention(a_plan(guard="cast", compute="bf16")))
    ids = torch.arange(3, 9)[None]
    lenient(ids)
    assert current_guard().report()["casts"] == 2  # fp32 weights outside autocast under a bf16 plan: one each layer
    with pytest.raises(DtypeContractError, match="LlamaAttention of layer 0"):
        strict(ids)


def test_attention_of_the_models_own_is_left_to_transformers() -> None:
    made = a_plan("eager")
    own = replace(made, attention=replace(made.attention, provider=because("model")))
    before = dict(AttentionInterface._global_mapping)
    guard = current_guard()
    assert register_attention(own) == "eager"
    assert current_guard() is not guard
    assert before == AttentionInterface._global_mapping
    assert AttentionMaskInterface._global_mapping["eager"] is not None


def test_a_block_leaves_no_trace() -> None:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    outer = current_guard()
    with registered_attention(a_plan(guard="strict", compute="fp16")):
        assert current_guard() is not outer
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == before
    assert current_guard() is outer


@pytest.mark.parametrize("softmax", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [False, True])
def test_padded_batches_equal_transformers_own(softmax: str, packing: bool) -> None:
    own, theirs = a_model(register_attention(a_plan(softmax, packing=packing))), a_model("eager")
    ids = torch.randint(3, 64, (3, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9]])).long()
    with torch.no_grad():
        a, b = (model(input_ids=ids, attention_mask=mask).logits[mask.bool()] for model in (own, theirs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_generating_with_a_cache_under_a_packing_plan(kind: str) -> None:
    own, theirs = a_model(register_attention(a_plan(packing=True)), kind), a_model("eager", kind)
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(
        own.generate(ids, attention_mask=mask, **settings), theirs.generate(ids, attention_mask=mask, **settings)
    )


def test_a_packed_row_builds_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model(register_attention(a_plan(packing=True)))
    built: list[Any] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        built.append(kwargs.get("attn_mask"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model(**packed_row(torch.randint(3, 64, (1, 9)), (4, 5)), use_cache=False)
    assert built == [None] * 4  # two samples in each of two layers


def test_position_ids_alone_are_masked_without_and_refused_with_a_packing_plan() -> None:
    row = packed_row(torch.randint(3, 64, (1, 9)), (4, 5))
    bare = {name: row[name] for name in ("input_ids", "position_ids")}
    masked = a_model(register_attention(a_plan()))
    with torch.no_grad():
        alone = masked(input_ids=row["input_ids"][:, 4:]).logits
        torch.testing.assert_close(masked(**bare, use_cache=False).logits[:, 4:], alone, rtol=1e-5, atol=1e-5)
    told = a_model(register_attention(a_plan(packing=True)))
    with pytest.raises(ModelError, match="LlamaAttention does not pass sample boundaries"):
        told(**bare, use_cache=False)
    told(input_ids=row["input_ids"])  # and goes on with rows that are not packed


@pytest.mark.parametrize("kind", ["stablelm", "nemotron"])
def test_families_that_do_not_hand_boundaries_on_raise_instead_of_leaking(kind: str) -> None:
    model = a_model(register_attention(a_plan(packing=True)), kind)
    with pytest.raises(ModelError, match="does not pass sample boundaries"):
        model(**packed_row(torch.randint(3, 64, (1, 9)), (4, 5)), use_cache=False)


@pytest.mark.parametrize("softmax", ["sdpa", "eager"])
def test_sinks_are_computed_or_refused(softmax: str) -> None:
    name = register_attention(a_plan(softmax))
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    if softmax == "sdpa":  # transformers knows that this family cannot
        with pytest.raises(ValueError, match="does not support"):
            a_model(name, "gpt_oss", **sizes)
    else:
        ids = torch.randint(3, 64, (1, 9))
        assert torch.equal(
            a_model(name, "gpt_oss", **sizes)(ids).logits, a_model("eager", "gpt_oss", **sizes)(ids).logits
        )


def test_what_sdpa_cannot_do_is_refused_at_the_call() -> None:
    attend = AttentionInterface._global_mapping[register_attention(a_plan())]
    heads = torch.randn(1, 2, 4, 8)
    for extra, wish in (({"softcap": 5.0}, "logit soft-capping"), ({"s_aux": torch.zeros(2)}, "attention sinks")):
        with pytest.raises(ModelError, match=wish):
            attend(torch.nn.Module(), heads, heads, heads, None, **extra)


def test_our_name_does_not_reach_a_saved_config(tmp_path: Path) -> None:
    a_model(register_attention(a_plan())).save_pretrained(tmp_path)
    assert "halftune" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.slow
def test_a_compiled_model_runs_packed_rows() -> None:
    model = a_model(register_attention(a_plan(packing=True)))
    row = packed_row(torch.randint(3, 64, (1, 9)), (4, 5))
    with torch.no_grad():
        expected = model(**row, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(**row, use_cache=False).logits, expected)


class AngleRotaryEmbedding(nn.Module):
    def forward(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).float(), torch.tensor([1.0, 0.37]))


class TableRotaryEmbedding(AngleRotaryEmbedding):
    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = super().forward(length)
        return angles.cos(), angles.sin()


def test_angles_are_not_rounded_under_autocast_and_tables_are() -> None:
    model = nn.ModuleList([AngleRotaryEmbedding(), TableRotaryEmbedding()])
    cast_qk_to_compute_dtype(model, plan("bf16"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        angles, tables = (rotary(300) for rotary in model)
    assert torch.equal(angles, torch.outer(torch.arange(300).float(), torch.tensor([1.0, 0.37])))
    assert {one.dtype for one in tables} == {torch.bfloat16}
