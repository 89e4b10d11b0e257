"""A packed row trains every sample as if it were alone: logits and gradients, family by family, backend by backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_linear_packing import Double
from tiny_model import because, plan
from torch.nn import functional as F
from torch.nn.attention import flex_attention as torch_flex
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from halftune.attention import flex, varlen
from halftune.model.attention.packed_rows import known_packed
from halftune.model.attention.packing_check import packed_row
from halftune.model.attention.register import registered_attention

LENGTHS = (11, 1, 19, 6)
BOUND = 1e-5
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 5}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 window": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, **WINDOW},
    "qwen3": {},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "mistral": WINDOW,
    "ministral3": {},
    "phi": {},
    "phi3": WINDOW,
    "gpt_oss": {**ALTERNATING, **EXPERTS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "olmoe": EXPERTS,
    "smollm3": {},
    "granite": {},
    "granitemoe": EXPERTS,
    "cohere": {},
    "cohere2": ALTERNATING,
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT, "head_dim": 8, "num_key_value_heads": 4},
    "ernie4_5": {},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": ALTERNATING,
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "starcoder2": {"sliding_window": 5},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
EAGER = {"gemma2", "gpt_oss"}  # logit capping and sinks: sdpa refuses them
BACKENDS = {
    "sdpa": [family for family in FAMILIES if family not in EAGER],
    "eager": ["llama", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe"],
    "fa2": ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "qwen3_moe", "deepseek_v3"],
    "flex": ["qwen2", "qwen2 window", "gemma2", "gpt_oss"],
}
CASES = [(family, backend) for backend, families in BACKENDS.items() for family in families]


def model_of(family: str, attention: str, experts: str | None = None) -> Any:
    sizes = {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    config = AutoConfig.for_model(family.split()[0], **{**sizes, **FAMILIES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention, experts_implementation=experts
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that attention, and any leak, shows
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval()


def stand_in(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *longest: int, **options: Any) -> torch.Tensor:
    """What a varlen kernel computes: causal attention inside each stretch, with window and capping."""
    rows = []
    left, _ = options["window"]
    for start, stop in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        queries, keys, values = (part[start:stop].transpose(0, 1) for part in (q, k, v))
        groups = queries.shape[0] // keys.shape[0]
        scores = queries @ keys.repeat_interleave(groups, 0).mT * options["scale"]
        if options["softcap"]:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (distance >= 0) & ((distance <= left) | torch.tensor(left < 0))
        weights = F.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        rows.append((weights @ values.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own formulas for flex attention, which it keeps from CPUs where gradients are needed."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "kernel", lambda: torch_flex.flex_attention)


@contextmanager
def packed_by(backend: str, guard: str = "cast") -> Iterator[str]:
    """The name of an attention that computes packed rows by a backend; kernels that need a GPU have a stand-in."""
    made = plan()
    routes = {
        "fa2": ("fa2", "torch", "torch_varlen"),
        "flex": ("flex", "transformers", "block_mask"),
    }.get(backend, (backend, "torch", "segments"))
    softmax, provider, path = map(because, routes)
    attention = replace(made.attention, softmax=softmax, provider=provider, varlen=path, guard=guard)
    kernel, named = varlen._KERNELS["torch_varlen"], varlen.named
    varlen.named = lambda place: (lambda: stand_in) if place == kernel else named(place)
    try:
        batch = replace(made.batch, packing=because(True))
        with registered_attention(replace(made, attention=attention, batch=batch)) as name:
            yield name
    finally:
        varlen.named = named


def gradients(model: Any, logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in logits]
    model.zero_grad()
    sum((part * weight).sum() for part, weight in zip(logits, weights, strict=True)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def bias_terms(model: Any) -> Iterator[dict[str, float]]:
    """Name of a bias → square of the norm of what its gradient sums: one row for each token.

    A sum of n numbers in fp32 is off by about sqrt(n) * 2^-24 of their norm, however small the sum is. That of a key
    bias before softmax is zero in exact arithmetic.
    """
    squares: dict[str, float] = {}

    def watch(name: str, output: Any) -> None:
        def add(gradient: torch.Tensor) -> None:
            squares[name] = squares.get(name, 0.0) + float(gradient.square().sum())

        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(add)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module._parameters.get("bias"), torch.Tensor):
                bias = f"{name}.bias"
                hooks.callback(module.register_forward_hook(lambda _, __, out, bias=bias: watch(bias, out)).remove)
        yield squares


def off_by(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).detach().norm() / theirs.detach().norm().clamp_min(1e-12))


def check(model: Any, set_attention: Any, attention: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Packed by ours against alone by the model's own eager attention: logits and the gradient of every trained weight.

    What fills a row up is a sample of its own, here the last one of ``lengths``.
    """
    ids = torch.randint(3, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    set_attention("eager")
    with bias_terms(model) as squares:
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
        expected = gradients(model, alone)
    set_attention(attention)
    with known_packed(True):
        packed = list(model(**packed_row(ids, lengths), use_cache=False).logits.split(lengths, 1))
    found = gradients(model, packed)
    assert max(off_by(a, b) for a, b in zip(packed, alone, strict=True)) < BOUND
    assert found.keys() == expected.keys()
    # What has no part in the loss but for rounding is held against the whole.
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        scale = max(float(value.norm()), squares.get(name, 0.0) ** 0.5, 1e-3 * float(whole))
        assert float((found[name] - value).norm()) / scale < BOUND, name


def adapted(base: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_packed_equals_alone(family: str, backend: str) -> None:
    """The gradients of all of the model's weights, and then of all of an adapter's."""
    with packed_by(backend) as name:
        model = model_of(family, name)
        check(model, model.set_attn_implementation, name)
        check(adapted(model), model.set_attn_implementation, name)


@pytest.mark.parametrize("family", BACKENDS["flex"])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (1, 127, 2, 1)])
def test_flex_in_double_precision(family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BOUND", 1e-11)
    with packed_by("flex", guard="off") as name, Double():
        model = model_of(family, name, experts="eager").double()
        check(model, model.set_attn_implementation, name, lengths)


@pytest.mark.parametrize(
    ("family", "backend"), [("qwen2", "sdpa"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager"), ("gpt_oss", "flex")]
)
def test_with_gradient_checkpointing(family: str, backend: str) -> None:
    """Frozen inputs, an adapter, and every layer computed anew in the backward pass from the row's boundaries."""
    with packed_by(backend) as name:
        base = model_of(family, name)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        check(adapted(base).train(), base.set_attn_implementation, name)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "fa2", "flex"])
@pytest.mark.parametrize("seed", range(4))
def test_with_random_lengths(backend: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (12,), generator=generator).tolist()
    with packed_by(backend) as name:
        model = model_of("gemma3_text", name)
        check(model, model.set_attn_implementation, name, (1, *lengths, 1))


def test_the_measure_sees_a_leak() -> None:
    """The same comparison, with the boundaries moved by one token."""
    with packed_by("sdpa") as name:
        model = model_of("llama", name)
        ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
        row = packed_row(ids, (5, 7))
        row["cu_seq_lens_q"] = torch.tensor([0, 4, 12], dtype=torch.int32)
        assert off_by(model(**row, use_cache=False).logits[:, 5:], alone) > 100 * BOUND


def test_a_known_row_has_no_mask_where_positions_show_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss makes masks without positions."""
    built = Mock(side_effect=masking_utils.flex_attention_mask)
    monkeypatch.setattr(masking_utils, "flex_attention_mask", built)
    with packed_by("flex") as name:
        model = model_of("gpt_oss", name)
        for lengths in (LENGTHS, (1,)):
            ids = torch.randint(3, 64, (1, sum(lengths)))
            with known_packed(True):
                model(**packed_row(ids, lengths), use_cache=False)
    assert not built.called
