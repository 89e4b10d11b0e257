"""The start-up check on a small copy of the model: who may be packed, who is refused and why."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from tiny_model import because, plan
from transformers import AttentionInterface, AutoConfig, LlamaConfig, LlamaForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.core.errors import ModelError
from halftune.model.attention import packing_check
from halftune.model.attention.packing_check import packing_error, packing_verdict, shrunk_config, small_copy
from halftune.model.attention.register import current_guard, registered_attention
from halftune.model.files.architectures import own_architectures

FULL_SIZE: dict[str, dict[str, Any]] = {
    # sizes of real checkpoints, so that what is built is what was shrunk
    "llama": {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80},
    "qwen2": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    "gemma2": {},
    "gemma3_text": {},
    "mistral": {},
    "phi3": {},
    "gpt_oss": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "olmo3": {},
    "cohere2": {},
    "opt": {},
    "gpt2": {},
    "gpt_bigcode": {},
}


def packing_plan() -> Any:
    made = plan()
    return replace(made, batch=replace(made.batch, packing=because(True)))


@pytest.mark.parametrize("family", FULL_SIZE)
def test_softmax_families_may_be_packed(family: str) -> None:
    config = AutoConfig.for_model(family, **FULL_SIZE[family])
    verdict = packing_verdict(config, packing_plan())
    assert verdict.value, verdict.reason
    assert family in verdict.reason


REFUSED = {
    "qwen3_5_text": "cannot run packed rows: `causal_conv1d_fn` can't keep packed sequences apart",
    "olmo_hybrid": "can't keep packed sequences apart",
    "minimax": "packed samples of minimax attend",
    "jamba": "packed samples of jamba attend",
    "doge": "cannot run packed rows: DogeAttention uses its own attention mask",  # made of the keys; lost, in silence
    "llama4_text": "the window is lost",  # chunks of the row, not of the sample
    "stablelm": "StableLmAttention does not pass sample boundaries",
    "bloom": "the model has its own attention code",
    "mamba2": "packed samples of mamba2 attend",
}


@pytest.mark.parametrize("family", REFUSED)
def test_who_is_refused_and_why(family: str) -> None:
    verdict = packing_verdict(AutoConfig.for_model(family), packing_plan())
    assert not verdict.value
    assert REFUSED[family] in verdict.reason
    assert "\n" not in verdict.reason


@pytest.mark.parametrize("name", sorted(name for name, raw in BUILTIN_MODELS.items() if "vision_config" not in raw))
def test_builtin_models(name: str) -> None:
    """All of them pack; those whose layers carry a state do by our operators only."""
    made = packing_plan()
    with own_architectures():
        config = AutoConfig.for_model(**BUILTIN_MODELS[name])
    routed = replace(made, attention=replace(made.attention, linear=because("halftune")))
    assert packing_verdict(config, routed).value
    # another model's layers would be transformers' own code here; RWKV-7 has one code, whatever the plan says
    carries_a_state = name in ("qwen3_5-tiny", "kimi_linear-tiny", "mamba2-tiny")
    assert packing_verdict(config, made).value == (not carries_a_state)


def test_it_changes_nothing_outside() -> None:
    config = AutoConfig.for_model("gemma3_text")
    before, names = config.to_dict(), dict(AttentionInterface._global_mapping)
    with registered_attention(packing_plan()):
        guard = current_guard()
        state = torch.get_rng_state()
        packing_verdict(config, packing_plan())
        assert torch.equal(torch.get_rng_state(), state)
        assert current_guard() is guard
    assert config.to_dict() == before
    assert names == AttentionInterface._global_mapping


def test_every_kind_of_layer_and_every_flag_is_in_the_copy() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12, sliding_window=512, attn_logit_softcapping=30.0)
    small = small_copy(config).config
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.num_hidden_layers == 2
    assert small.sliding_window == 8 < min(packing_check.LENGTHS[:2])
    assert small.head_dim == config.head_dim
    assert small.attn_logit_softcapping == 30.0
    values = shrunk_config(LlamaConfig(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, mlp_bias=True))
    assert (values["num_attention_heads"], values["num_key_value_heads"], values["hidden_size"]) == (4, 2, 512)
    assert values["mlp_bias"] is True


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing_check.packed_row

    def shifted(ids: torch.Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
        row = original(ids, lengths)
        row["cu_seq_lens_q"] = torch.tensor([0, ids.shape[1]], dtype=torch.int32)  # one sample, it says
        return row

    monkeypatch.setattr(packing_check, "packed_row", shifted)
    verdict = packing_verdict(LlamaConfig(), packing_plan())
    assert not verdict.value
    assert "packed samples of llama attend" in verdict.reason


def test_a_bug_of_ours_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(packing_check, "small_copy", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        packing_verdict(LlamaConfig(), packing_plan())


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, ValueError, RuntimeError, AssertionError])
def test_an_error_is_a_refusal_where_the_model_raises_it_and_a_bug_where_we_do(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        raise error("what happened")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "forward", theirs)
        verdict = packing_verdict(LlamaConfig(), packing_plan())
        assert not verdict.value
        assert "what happened" in verdict.reason
    ours = FunctionType(theirs.__code__, vars(packing_check), closure=theirs.__closure__)
    monkeypatch.setattr(packing_check, "shrunk_config", ours)
    with pytest.raises(error, match="what happened"):
        packing_verdict(LlamaConfig(), packing_plan())


def test_a_model_outside_the_interface_is_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=128))
    with registered_attention(packing_plan()) as name:
        model.set_attn_implementation = lambda attention: None
        with pytest.raises(ModelError, match="own attention code"):
            packing_error(model, name)


def _with_a_mask(forward: Any) -> Any:
    def broken(self: Any, input_ids: Any, **inputs: Any) -> Any:
        return forward(self, input_ids=input_ids, **{"attention_mask": torch.ones_like(input_ids), **inputs})

    return broken


def _with_a_cache(forward: Any) -> Any:
    def broken(self: Any, **inputs: Any) -> Any:
        return forward(self, **{**inputs, "use_cache": True})

    return broken


def _without_boundaries(forward: Any) -> Any:
    def broken(self: Any, **inputs: Any) -> Any:
        return forward(self, **{k: v for k, v in inputs.items() if not k.startswith("cu_seq_lens")})

    return broken


def _positions_run_on(forward: Any) -> Any:
    def broken(self: Any, input_ids: Any, **inputs: Any) -> Any:
        return forward(self, input_ids=input_ids, **inputs | {"position_ids": torch.arange(input_ids.shape[1])[None]})

    return broken


@pytest.mark.parametrize(
    ("breaks", "harmless"),
    [(_with_a_mask, True), (_with_a_cache, True), (_without_boundaries, False), (_positions_run_on, True)],
)
def test_a_model_that_breaks_the_rules_of_packing_is_refused_or_does_no_harm(
    breaks: Any, harmless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaks in transformers: a mask passed, the cache left on, boundaries dropped.

    Ours computes sample by sample from the boundaries whatever mask there is, so the first two do not leak; rotary
    positions are relative, so positions that run on do not either.
    """
    monkeypatch.setattr(LlamaForCausalLM, "forward", breaks(LlamaForCausalLM.forward))
    verdict = packing_verdict(LlamaConfig(), packing_plan())
    assert verdict.value == harmless, verdict.reason
