"""RWKV-7: the paper's formulas, fla's names, generation from states, half precision, adapters, saving and scopes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rwkv7_loop import logits_of
from safetensors import safe_open
from tiny_model import because, plan, section
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halftune.attention.linear import route_linear
from halftune.config.facts.model import facts_from_config, read_model_facts
from halftune.config.sections.model import AttentionSection, LoraAdapter
from halftune.core.errors import ModelError, PlanError
from halftune.hardware.catalogue import lookup
from halftune.model.adapters import attach_adapter
from halftune.model.attention.linear import routed_linear_layers
from halftune.model.attention.packing_check import packing_verdict
from halftune.model.attention.register import registered_attention
from halftune.model.files.architectures import own_architectures, runs_its_code
from halftune.model.load.load import load_model
from halftune.model.result.merge import merge_adapter
from halftune.model.result.save import save_final
from halftune.model.rwkv7 import mixing, modeling
from halftune.model.rwkv7.configuration import RWKV7Config
from halftune.model.rwkv7.modeling import RWKV7ForCausalLM
from halftune.model.rwkv7.row_context import describe_row
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan
from halftune.precision.resolve import keep_fp32
from halftune.precision.trace.cuda_rules import cuda_autocast_rules
from halftune_kernels.ops.rwkv7 import rwkv7

RANKS = dict.fromkeys(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 8)
RAW: dict[str, Any] = {
    **{"model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 3},
    **{"head_dim": 16, "vocab_size": 256, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None, **RANKS},
}
# The names in a checkpoint, as flash-linear-attention 0.6.0 writes and reads them, of the second layer.
NAMES_OF_A_LAYER = {
    *(f"attn.x_{name}" for name in "rwkvag"),
    *("attn.k_k", "attn.k_a", "attn.r_k", "attn.g_norm.weight", "attn.g_norm.bias"),
    *(f"attn.{name}_proj.weight" for name in "rkvo"),
    *(f"attn.{name}_lora.lora.{number}.weight" for name in "wvag" for number in (0, 2)),
    *(f"attn.{name}_lora.lora.2.bias" for name in "wva"),
    *(f"{name}_norm.{kind}" for name in ("attn", "ffn") for kind in ("weight", "bias")),
    *("ffn.x_k", "ffn.key.weight", "ffn.value.weight"),
}
KEEP = keep_fp32(facts_from_config(RAW, "rwkv7"))[0]


def model_of(**changes: Any) -> Any:
    """All weights random, large enough for every term to count; in fp32."""
    generator = torch.Generator().manual_seed(0)
    values = {name: value for name, value in {**RAW, **changes}.items() if name != "model_type"}
    model = RWKV7ForCausalLM(RWKV7Config(**values))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3))
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """In bf16, as they are published, with the vectors that stay fp32 as such."""
    folder = tmp_path / "model"
    model_of().to(torch.bfloat16).save_pretrained(folder)
    return folder


def a_plan(storage: str = "fp32", trainable: str = "fp32", **given: Any) -> Plan:
    made = plan(storage, trainable, keep=KEEP, **given)
    attention = replace(made.attention, softmax=because("eager"), provider=because("model"), linear=because("halftune"))
    return replace(made, attention=replace(attention, guard="strict"))


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.detach() - truth.detach()).norm() / truth.detach().norm())


def gradients_of(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and each parameter's gradient of their mean square."""
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: weight.grad.clone() for name, weight in model.named_parameters()}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"fuse_norm": False, "norm_first": False}, {"norm_bias": False, "value_dim": [64] * 3, "hidden_ratio": 3}],
)
def test_the_papers_formulas(changes: dict[str, Any]) -> None:
    """Logits and the gradient of every weight."""
    model = model_of(**changes).double().train()
    ids = torch.randint(3, 256, (1, 70))
    model(input_ids=ids).logits.square().mean().backward()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    expected = logits_of(weights, ids[0], layers=3, head=16, eps=1e-5, fused=model.config.fuse_norm)
    expected.square().mean().backward()
    assert relative(model(input_ids=ids).logits[0], expected) < 1e-12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        truth = weights[name].grad
        assert truth is not None
        assert relative(parameter.grad, truth) < 1e-9, name


def test_the_names_are_flas(tmp_path: Path) -> None:
    model = model_of()
    names = dict(model.named_parameters()).keys()
    second = {name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")}
    assert second == NAMES_OF_A_LAYER
    first = {name.removeprefix("model.layers.0.") for name in names if name.startswith("model.layers.0.")}
    assert first == {name for name in second if "v_lora" not in name} | {"pre_norm.weight", "pre_norm.bias"}
    outside = {name for name in names if ".layers." not in name}
    assert outside == {"model.embeddings.weight", "model.norm.weight", "model.norm.bias", "lm_head.weight"}
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(names)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "rwkv7"
    assert saved["architectures"] == ["RWKV7ForCausalLM"]
    assert read_model_facts(section(tmp_path)).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_from_states_as_in_one_pass(dtype: torch.dtype, bound: float) -> None:
    """One token at a time, and in pieces; a row padded on the left gives what it gives alone."""
    model = model_of().to(dtype)
    ids = torch.randint(3, 256, (2, 80))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        past, parts = None, []
        for piece in ids.split([64, 7, *[1] * 9], 1):
            out = model(input_ids=piece, past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
        assert relative(torch.cat(parts, 1), whole) < bound
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        padded = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:1, 30:]
        assert relative(padded, model(input_ids=ids[:1, 30:], use_cache=False).logits) < bound


@pytest.mark.parametrize("use_cache", [None, True])
def test_a_packed_row_keeps_its_samples_apart_also_where_a_cache_is_asked_for(use_cache: bool | None) -> None:
    """``config.use_cache`` is on outside training: the token before a sample's first is another sample's last."""
    model, ids = model_of(), torch.randint(3, 256, (1, 20))
    bounds, numbers = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([[0] * 7 + [1] * 13])
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split((7, 13), 1)], 1)
        for where in ({"cu_seq_lens_q": bounds}, {"seq_idx": numbers}):
            packed = model(input_ids=ids, use_cache=use_cache, **where)
            assert relative(packed.logits, alone) < 1e-5
            assert packed.past_key_values is None
        past = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(ModelError, match="past_key_values and sample boundaries"):
            model(input_ids=ids, past_key_values=past, cu_seq_lens_q=bounds)


def test_generate_goes_from_its_states() -> None:
    model, ids = model_of(), torch.randint(3, 256, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    answers = [model.generate(ids, use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*answers)
    beams = [model.generate(ids, use_cache=cached, num_beams=3, **settings) for cached in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_mixed_precision_reaches_the_operator_in_one_dtype(name: str) -> None:
    """The seed's case, ``k.addcmul(k * (a - 1), k_a)`` with fp32 vectors under autocast: nothing strays, all learn.

    Normalised keys and group norm divide by what may be near zero, so a draw can magnify each rounding some hundred
    times. By how much, fp32 against fp64 tells.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    model, ids = model_of().train(), torch.randint(3, 256, (1, 70))
    single, exact = gradients_of(model, ids), gradients_of(model.double(), ids)
    model.float().zero_grad()
    made = a_plan()
    made = replace(made, precision=replace(made.precision, compute=because(name), autocast=because(True)))
    with registered_attention(made), routed_linear_layers(model, made):
        assert mixing.rwkv7 is not rwkv7  # behind the guard, which is strict
        with cuda_autocast_rules(), torch.autocast("cpu", dtype=dtype):
            logits = model(input_ids=ids).logits
    assert mixing.rwkv7 is rwkv7
    logits.float().square().mean().backward()
    assert relative(logits.float(), exact["logits"]) < 30 * torch.finfo(dtype).eps
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        magnified = max(1.0, relative(single[key], exact[key]) / torch.finfo(torch.float32).eps)
        assert relative(parameter.grad, exact[key]) < 30 * magnified * torch.finfo(dtype).eps, key


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_weights_beside_fp32_vectors(checkpoint: Path, name: str) -> None:
    """As an adapter's base is loaded: the vectors stay fp32, the forward pass needs no autocast."""
    model = load_model(section(checkpoint), a_plan(name), for_training=False)
    dtypes = {key.partition("layers.1.")[2]: p.dtype for key, p in model.named_parameters() if ".layers.1." in key}
    kept = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {"attn.k_k", "attn.k_a", "attn.r_k", *(f"attn.{x}_lora.lora.2.bias" for x in "wva")}
    exact = load_model(section(checkpoint), a_plan(), for_training=False)
    ids = torch.randint(3, 256, (1, 20))
    with torch.no_grad():
        error = relative(model(input_ids=ids).logits.float(), exact(input_ids=ids).logits)
    assert error < 30 * torch.finfo(next(p.dtype for p in model.parameters())).eps


@pytest.mark.parametrize("adapter", [None, LoraAdapter(rank=4)], ids=["full", "lora"])
def test_what_stays_fp32_is_saved_so(checkpoint: Path, tmp_path: Path, adapter: LoraAdapter | None) -> None:
    made = a_plan("bf16", saved="bf16") if adapter else a_plan(saved="bf16")
    model: Any = load_model(section(checkpoint), made)
    if adapter:
        model = attach_adapter(model, adapter, made, 0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    if adapter:
        merged = merge_adapter(section(checkpoint), tmp_path / "final", made, "bf16")
        assert merged.forward_error <= merged.bound
        assert set(dict(merged.model.named_parameters())) == set(dict(model_of().named_parameters()))
        return
    with safe_open(tmp_path / "final" / "model.safetensors", "pt") as file:
        formats = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert formats["model.layers.1.attn.w_lora.lora.2.bias"] == formats["model.layers.0.attn.k_a"] == "F32"
    assert formats["model.layers.1.attn.w_lora.lora.2.weight"] == formats["lm_head.weight"] == "BF16"
    load_model(section(tmp_path / "final"), made)


def test_transformers_knows_it_only_inside() -> None:
    class Others(RWKV7Config):
        pass

    with pytest.raises(ValueError, match="rwkv7"):
        AutoConfig.for_model("rwkv7")
    AutoConfig.register("rwkv7", Others)
    try:
        with own_architectures():
            assert type(AutoConfig.for_model("rwkv7")) is RWKV7Config
        assert type(AutoConfig.for_model("rwkv7")) is Others
    finally:
        CONFIG_MAPPING._extra_content.pop("rwkv7")


def test_code_beside_the_checkpoint_does_not_run(checkpoint: Path) -> None:
    """Published ones bring code that imports flash-linear-attention; their tokenizers' code may be trusted."""
    file = checkpoint / "config.json"
    raw = json.loads(file.read_text())
    raw["auto_map"] = {"AutoConfig": "modeling_rwkv7.RWKV7Config", "AutoModelForCausalLM": "modeling_rwkv7.RWKV7Model"}
    file.write_text(json.dumps(raw))
    (checkpoint / "modeling_rwkv7.py").write_text("raise RuntimeError('it ran')")
    assert not runs_its_code(checkpoint, trust_remote_code=True)
    assert isinstance(load_model(section(checkpoint, trust_remote_code=True), a_plan()), RWKV7ForCausalLM)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn": {"layers": [1], "num_heads": 2}}, "softmax-attention layers"),
        ({"head_dim": 24}, "not a multiple of head_dim 24"),
        ({"value_dim": [32, 64, 64]}, "several widths"),
    ],
)
def test_what_is_not_supported_is_said_before_loading(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        facts_from_config({**RAW, **changes}, "here")


def test_nobody_else_can_compute_it() -> None:
    facts = facts_from_config(RAW, "here")
    route: Callable[[str], Any] = lambda linear: route_linear(  # noqa: E731
        AttentionSection.model_validate({"linear": linear}), lookup("h200"), facts
    )
    chosen = route("auto")
    assert chosen.chosen.value == "halftune"
    assert "rwkv7" in dict(chosen.rejected)["torch"]
    for other in ("torch", "fla"):
        with pytest.raises(PlanError, match="is unavailable"):
            route(other)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 128, "value_dim": [2048] * 24}])
def test_the_check_before_packing_sees_a_leak(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a config of full size; a model that is not told where samples end fails it."""
    config, made = RWKV7Config(**changes), a_plan()
    made = replace(made, batch=replace(made.batch, packing=because(True)))
    assert packing_verdict(config, made).value
    monkeypatch.setattr(modeling, "describe_row", lambda x, mask, _: describe_row(x, mask, {}))
    assert "packed samples of rwkv7 attend" in packing_verdict(config, made).reason


@pytest.mark.slow
def test_whoever_reads_no_rwkv7_imports_none() -> None:
    """Its model takes seconds to import, and a look at data wants a tokenizer only."""
    program = (
        "import sys, halftune.model.tokenizer.tokenizer; print([one for one in sys.modules if 'rwkv7.modeling' in one])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
