"""A packed row trains every sample as if it were alone: logits and parameter gradients, family by family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import because, plan
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.model.packing_check import packed_row
from halftune.model.patch import registered_attention

LENGTHS = (11, 1, 19, 6)
BOUND = 1e-5
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 5}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 window": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, **WINDOW},
    "qwen3": {},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "mistral": WINDOW,
    "phi3": WINDOW,
    "gpt_oss": {**ALTERNATING, **EXPERTS},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32},
    "mixtral": EXPERTS,
    "olmo2": {},
    "smollm3": {},
    "granite": {},
    "cohere2": ALTERNATING,
    "glm4": {},
    "gpt2": {},
}
EAGER = {"gemma2", "gpt_oss"}  # logit capping and sinks


def model_of(family: str, attention: str) -> Any:
    kind = family.split()[0]
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that attention, and any leak, shows
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def gradients(model: Any, logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(part.shape, generator=generator) for part in logits]
    model.zero_grad()
    sum((part * weight).sum() for part, weight in zip(logits, weights, strict=True)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def off_by(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).detach().norm() / theirs.detach().norm().clamp_min(1e-12))


def check(model: Any, set_attention: Any, attention: str) -> None:
    """Packed by ours against alone by the model's own eager attention."""
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    set_attention("eager")
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    expected = gradients(model, alone)
    set_attention(attention)
    packed = list(model(**packed_row(ids, LENGTHS), use_cache=False).logits.split(LENGTHS, 1))
    found = gradients(model, packed)
    assert max(off_by(a, b) for a, b in zip(packed, alone, strict=True)) < BOUND
    assert found.keys() == expected.keys()
    # A gradient that is zero but for rounding (a bias before softmax) is held against the whole, not against itself.
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        assert float((found[name] - value).norm() / value.norm().clamp_min(1e-3 * whole)) < BOUND, name


def packing_plan(softmax: str) -> Any:
    made = plan()
    attention = replace(made.attention, softmax=because(softmax), varlen=because("segments"))
    return replace(made, attention=attention, batch=replace(made.batch, packing=because(True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family: str) -> None:
    with registered_attention(packing_plan("eager" if family in EAGER else "sdpa")) as name:
        model = model_of(family, name)
        check(model, model.set_attn_implementation, name)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_with_gradient_checkpointing_and_adapters(family: str) -> None:
    with registered_attention(packing_plan("sdpa")) as name:
        base = model_of(family, name)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        check(get_peft_model(base, config).train(), base.set_attn_implementation, name)


def test_the_measure_sees_a_leak() -> None:
    """The same comparison, with the boundaries moved by one token."""
    with registered_attention(packing_plan("sdpa")) as name:
        model = model_of("llama", name)
        ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
        row = packed_row(ids, (5, 7))
        row["cu_seq_lens_q"] = torch.tensor([0, 4, 12], dtype=torch.int32)
        assert off_by(model(**row, use_cache=False).logits[:, 5:], alone) > 100 * BOUND
