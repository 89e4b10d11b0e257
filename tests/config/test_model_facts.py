"""What config.json tells: sizes, exact parameter counts against transformers, and clear errors for damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.architecture import Tensor
from halftune.config.facts.model import facts_from_config, read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.files.architectures import own_architectures

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {"num_key_value_heads": 2}),
    ("llama with biases", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("llama, old config without key heads", "llama", {}),
    ("llama, tied", "llama", {"tie_word_embeddings": True}),
    ("granite", "granite", {"num_key_value_heads": 2}),
    ("helium", "helium", {"num_key_value_heads": 2, "head_dim": 16}),
    ("smollm3", "smollm3", {}),
    ("mistral", "mistral", {"num_key_value_heads": 2}),
    ("ministral", "ministral", {"num_key_value_heads": 2, "head_dim": 32}),
    ("qwen2", "qwen2", {"num_key_value_heads": 2}),
    ("qwen2, tied", "qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3, defaults", "qwen3", {"num_key_value_heads": 2}),
    ("qwen3, bias", "qwen3", {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True}),
    ("gemma", "gemma", {"num_key_value_heads": 1}),
    ("gemma2", "gemma2", {}),
    ("gemma3", "gemma3_text", {"head_dim": 32}),
    ("phi3", "phi3", {"num_key_value_heads": 2}),
    ("starcoder2", "starcoder2", {}),
    ("starcoder2 without biases", "starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("olmo", "olmo", {}),
    ("olmo2", "olmo2", {"num_key_value_heads": 2}),
    ("olmo3", "olmo3", {"num_key_value_heads": 2}),
    ("mixtral", "mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ("qwen2_moe", "qwen2_moe", {**EXPERTS, "num_key_value_heads": 2, "shared_expert_intermediate_size": 80}),
    ("qwen2_moe, some dense", "qwen2_moe", {**EXPERTS, "num_key_value_heads": 2, "mlp_only_layers": [0]}),
    ("qwen3_moe", "qwen3_moe", {**EXPERTS}),
    ("qwen3_moe, every other", "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    ("olmoe", "olmoe", {"num_experts": 4, "num_key_value_heads": 4}),
    ("gpt_oss", "gpt_oss", {"num_local_experts": 4}),
    ("qwen3_next", "qwen3_next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    ("qwen3_5", "qwen3_5_text", {**LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2}),
    ("qwen3_5, interval", "qwen3_5_text", {**LINEAR}),
    ("qwen3_5_moe", "qwen3_5_moe_text", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    ("gpt2", "gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("gpt2, inner width", "gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 100, "n_positions": 77}),
    ("gpt_neox", "gpt_neox", {}),
    ("gpt_neox without attention bias", "gpt_neox", {"attention_bias": False}),
    ("falcon 7b style", "falcon", {}),
    ("falcon 40b style", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon rw style", "falcon", {"parallel_attn": False, "multi_query": False, "alibi": True, "bias": True}),
]
RWKV7 = {
    **{"num_heads": 2, "head_dim": None, "value_dim": 128, "norm_first": False, "norm_bias": False, "hidden_ratio": 3},
    **{"decay_low_rank_dim": None, "a_low_rank_dim": 12, "v_low_rank_dim": None, "gate_low_rank_dim": None},
}
# Their sizes have names of their own: the tensors are compared, and through them the sizes.
STATEFUL: list[tuple[str, str, dict[str, Any]]] = [
    ("mamba2", "mamba2", {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 12, "n_groups": 2}),
    (
        "kimi_linear",
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            **{"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 3, "moe_intermediate_size": 24},
            **{"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
            **{"num_experts": 3, "num_experts_per_token": 2, "num_shared_experts": 2},
        },
    ),
    (
        "kimi_linear, queries of low rank",
        "kimi_linear",
        {
            "layer_types": ["full_attention", *["linear_attention"] * 3],
            "mlp_layer_types": ["dense"] * 4,
            **{"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "q_lora_rank": 20},
            **{"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14},
        },
    ),
    ("rwkv7", "rwkv7", {"head_dim": 16, "intermediate_size": None, "tie_word_embeddings": False}),
    ("rwkv7, other switches", "rwkv7", RWKV7),
]

LINEAR_CLASSES = ("Linear", "Conv1D", "FalconLinear", "WideBias")


def config_of(model_type: str, extra: dict[str, Any]) -> dict[str, Any]:
    base = {k: v for k, v in SMALL.items() if model_type != "gpt2" or k.endswith(("vocab_size", "token_id"))}
    return {**base, "model_type": model_type, **extra}


def built_config(raw: dict[str, Any]) -> PretrainedConfig:
    with own_architectures():
        return AutoConfig.for_model(**raw)


@pytest.mark.parametrize(
    ("model_type", "extra"), [case[1:] for case in [*CASES, *STATEFUL]], ids=[case[0] for case in [*CASES, *STATEFUL]]
)
def test_tensors_are_those_of_transformers(model_type: str, extra: dict[str, Any]) -> None:
    """Name by name and shape by shape, on the meta device."""
    raw = config_of(model_type, extra)
    facts = facts_from_config(raw, "here")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built_config(raw))
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours: dict[str, tuple[int, ...]] = {}
    for tensor in facts.tensors:
        for module in tensor.modules():
            ours[f"{module}.{tensor.name.rpartition('.')[2]}".lstrip(".")] = tensor.shape
    for name in built.keys() & ours.keys():
        if model_type == "gpt2" and len(built[name]) == 2:  # Conv1D keeps its weight transposed
            assert sorted(ours[name]) == sorted(built[name]), name
        else:
            assert ours[name] == built[name], name
    assert ours.keys() == built.keys()
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert facts.num_parameters_exact
    linear = {name for name, module in model.named_modules() if type(module).__name__ in LINEAR_CLASSES}
    kinds = {m: t.kind for t in facts.tensors for m in t.modules() if t.kind != "parameter"}
    assert {m for m, kind in kinds.items() if kind in ("linear", "conv1d", "router")} == linear - {"lm_head"}
    assert {kind == "conv1d" for kind in kinds.values() if kind in ("linear", "conv1d")} == {model_type == "gpt2"}
    assert [m for m, kind in kinds.items() if kind == "head"] == ([] if facts.tie_word_embeddings else ["lm_head"])


@pytest.mark.parametrize(("model_type", "extra"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_sizes_are_those_of_transformers(model_type: str, extra: dict[str, Any]) -> None:
    raw = config_of(model_type, extra)
    facts, config = facts_from_config(raw, "here"), built_config(raw)
    heads = config.num_attention_heads
    assert (facts.hidden_size, facts.num_layers, facts.num_heads) == (
        config.hidden_size,
        config.num_hidden_layers,
        heads,
    )
    assert facts.tie_word_embeddings == config.tie_word_embeddings
    types = getattr(config, "layer_types", None) or []
    assert facts.linear_layers == sum(kind == "linear_attention" for kind in types)
    assert facts.softcap == getattr(config, "attn_logit_softcapping", None)
    if types:
        assert facts.window_layers == (
            sum(kind == "sliding_attention" for kind in types) if facts.sliding_window else 0
        )


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_builtin_models_are_counted_exactly(name: str) -> None:
    facts = read_model_facts(ModelSection(name_or_path=f"builtin:{name}"))
    with torch.device("meta"):
        kind = AutoModelForMultimodalLM if facts.multimodal else AutoModelForCausalLM
        model = kind.from_config(built_config(BUILTIN_MODELS[name]))
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert facts.num_parameters + (facts.tower_parameters or 0) == whole
    assert facts.dtype == "fp32"


def folder_with(tmp_path: Path, raw: dict[str, Any] | str) -> ModelSection:
    (tmp_path / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return ModelSection(name_or_path=str(tmp_path))


def test_what_transformers_cannot_build_is_estimated(tmp_path: Path) -> None:
    raw = {**SMALL, "model_type": "llama", "num_key_value_heads": 3, "hidden_size": 66}
    facts = read_model_facts(folder_with(tmp_path, raw))
    assert not facts.num_parameters_exact
    assert not facts.tensors
    assert facts.num_parameters == sum(tensor.size * tensor.count for tensor in facts.likely_tensors)


def test_headers_count_what_is_on_disk(tmp_path: Path) -> None:
    """Sharded, a tied head saved twice, a prediction head that is not loaded; the files' dtype wins."""
    section = folder_with(tmp_path, {**SMALL, "model_type": "arcee", "tie_word_embeddings": True, "dtype": "bfloat16"})
    table = torch.zeros(300, 64, dtype=torch.float16)
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(64), "mtp.fc.weight": torch.zeros(9, 9)}, tmp_path / "b.safetensors")
    weight_map = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    facts = read_model_facts(section)
    assert facts.num_parameters == 300 * 64 + 64
    assert facts.num_parameters_exact
    assert facts.dtype == "fp16"


@pytest.mark.parametrize(
    ("model_type", "extra"), [case[1:] for case in [*CASES, *STATEFUL]], ids=[case[0] for case in [*CASES, *STATEFUL]]
)
def test_a_whole_checkpoint_as_transformers_saves_it_is_never_refused(
    tmp_path: Path, model_type: str, extra: dict[str, Any]
) -> None:
    """GPT-2 keeps its matrices transposed, GPT-NeoX its head under another name; old configs hold only differences."""
    config = built_config(config_of(model_type, {"num_hidden_layers": 4, **extra, "vocab_size": 60}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    section = ModelSection(name_or_path=str(tmp_path))
    assert read_model_facts(section).num_parameters_exact
    (tmp_path / "config.json").write_text(json.dumps({**config.to_diff_dict(), "model_type": model_type}))
    assert read_model_facts(section).num_parameters_exact


def test_a_missing_weight_is_refused_unless_another_could_become_it(tmp_path: Path) -> None:
    raw = {**SMALL, "model_type": "llama", "num_hidden_layers": 1}
    section = folder_with(tmp_path, raw)
    shapes = {name: tensor.shape for tensor in facts_from_config(raw, "x").tensors for name in _names(tensor)}
    del shapes["lm_head.weight"]
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 weight is missing, first lm_head.weight: they would be random"):
        read_model_facts(section)
    renamed = {**shapes, "embed_out.weight": (300, 64)}
    save_file({name: torch.zeros(shape) for name, shape in renamed.items()}, tmp_path / "model.safetensors")
    assert read_model_facts(section).num_layers == 1


def _names(tensor: Tensor) -> list[str]:
    return [tensor.name.replace("*", str(layer)) for layer in tensor.layers or ("",)]


def test_the_number_of_layers_is_that_of_their_kinds() -> None:
    raw = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    kinds = ["linear_attention", "mlp", "full_attention"]
    assert facts_from_config({**raw, "model_type": "nemotron_h", "layers_block_type": kinds}, "x").num_layers == 3


@pytest.mark.parametrize("own", [True, False])
def test_a_head_of_its_own_counts_whatever_the_config_says(tmp_path: Path, own: bool) -> None:
    section = folder_with(tmp_path, {**SMALL, "model_type": "llama", "tie_word_embeddings": True})
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    head = table + (1.0 if own else 0.0)
    weights = {"model.embed_tokens.weight": table, "lm_head.weight": head, "mtp.fc.weight": torch.zeros(9, 9)}
    save_file(weights, tmp_path / "model.safetensors")
    facts = read_model_facts(section)
    assert facts.tie_word_embeddings is not own
    assert facts.num_parameters == (2 if own else 1) * 300 * 64
    assert any(tensor.module == "lm_head" for tensor in facts.tensors) is own


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_a_word_about_them_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = {**SMALL, "model_type": "llama"}
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({name: torch.zeros(96, 64).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"{name} is stored as (I8|F8_E4M3), but config.json has no quantization_conf"
    ):
        read_model_facts(folder_with(tmp_path, raw))
    named = {**raw, "quantization_config": {"quant_method": "fp8"}}
    assert read_model_facts(folder_with(tmp_path, named)).quantization == "fp8"


def test_fp64_is_told(tmp_path: Path) -> None:
    save_file({"model.layers.0.w1": torch.zeros(64, dtype=torch.float64)}, tmp_path / "model.safetensors")
    assert read_model_facts(folder_with(tmp_path, {**SMALL, "model_type": "llama"})).dtype == "fp64"


def test_of_a_single_file_and_shards_the_one_that_is_loaded_counts(tmp_path: Path) -> None:
    section = folder_with(tmp_path, {**SMALL, "model_type": "llama"})
    save_file({"model.layers.0.w1": torch.zeros(64, dtype=torch.float16)}, tmp_path / "model.safetensors")
    save_file({"model.layers.0.w1": torch.zeros(64)}, tmp_path / "old.safetensors")
    index = {"weight_map": {"model.layers.0.w1": "old.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_model_facts(section).dtype == "fp16"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    section = folder_with(tmp_path, {**SMALL, "model_type": "llama"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ModelError, match="1 of 1 weight files are missing, first gone"):
        read_model_facts(section)


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_weight_file_is_an_error(tmp_path: Path, damage: str) -> None:
    section, file = folder_with(tmp_path, {**SMALL, "model_type": "llama"}), tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, file)
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[:-50], "empty": b"", "text": b"version https://git-lfs.github.com/spec/v1\n"}[damage]
    )
    with pytest.raises(ModelError, match="corrupt or truncated safetensors file"):
        read_model_facts(section)


TENSOR = {"dtype": "F32", "shape": [2, 2]}
FIRST, SECOND = {**TENSOR, "data_offsets": [0, 16]}, {**TENSOR, "data_offsets": [16, 32]}
LIES = {
    "overlap": json.dumps({"a": FIRST, "b": SECOND, "c": FIRST}),
    "partly": json.dumps({"a": FIRST, "b": {**TENSOR, "data_offsets": [8, 24]}, "c": SECOND}),
    "gap": json.dumps({"b": SECOND}),
    "twice": f'{{"a": {json.dumps(FIRST)}, "a": {json.dumps(SECOND)}, "b": {json.dumps(FIRST)}}}',
}


@pytest.mark.parametrize("lie", LIES)
def test_tensors_that_share_bytes_or_a_name_are_an_error(tmp_path: Path, lie: str) -> None:
    section, header = folder_with(tmp_path, {**SMALL, "model_type": "llama"}), LIES[lie].encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    with pytest.raises(ModelError) as caught:
        read_model_facts(section)
    assert caught.value.code == "core.file_damaged"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_weights_of_whole_numbers_need_a_quantisation(tmp_path: Path, dtype: torch.dtype) -> None:
    section = folder_with(tmp_path, {**SMALL, "model_type": "llama"})
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        read_model_facts(section)
    assert caught.value.code == "model.quantization_unknown"


def test_a_weight_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, file = folder_with(tmp_path, {**SMALL, "model_type": "llama"}), tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, file)
    opened = Path.open

    def refuse(path: Path, *args: Any, **named: Any) -> Any:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match="Permission denied") as caught:
        read_model_facts(section)
    assert caught.value.code == "core.unreadable"


def test_the_text_part_of_a_multimodal_model() -> None:
    raw = {
        "model_type": "qwen3_5",
        "text_config": {
            **SMALL,
            **LINEAR,
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
        },
        "vision_config": {"hidden_size": 999},
        "tie_word_embeddings": True,
    }
    facts = facts_from_config(raw, "here")
    assert (facts.model_type, facts.hidden_size, facts.linear_layers, facts.dtype) == ("qwen3_5", 64, 3, "bf16")
    assert facts.tie_word_embeddings
    assert (
        facts.num_parameters
        == facts_from_config({**raw["text_config"], "tie_word_embeddings": True}, "x").num_parameters
    )


def test_windows_experts_sinks_and_quantisation() -> None:
    gemma = facts_from_config({**SMALL, "model_type": "gemma2", "num_hidden_layers": 26}, "x")
    assert (gemma.softcap, gemma.sliding_window, gemma.head_dim) == (50.0, 4096, 256)
    oss = facts_from_config({**SMALL, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "x")
    assert (oss.sinks, oss.num_experts, oss.num_experts_per_token, oss.quantization) == (True, 128, 4, "mxfp4")
    qwen = facts_from_config({**SMALL, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 128}, "x")
    assert (qwen.sliding_window, qwen.window_layers) == (None, 0)
    hybrid = facts_from_config({**SMALL, "model_type": "bamba"}, "x")
    assert hybrid.linear_layers == 4


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{broken", r"config\.json:1: not valid JSON"),
        ("", r"config\.json:1: not valid JSON"),
        ("[1]", "expected a JSON object"),
        ({"hidden_size": 4}, "no model_type"),
        ({**SMALL, "model_type": "lama"}, "did you mean llama"),
        ({**SMALL, "model_type": "bert"}, "is an encoder"),
        ({**SMALL, "model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({**SMALL, "model_type": "mystery9000", "auto_map": {"AutoModelForCausalLM": "a.B"}}, "trust_remote_code"),
        ({**SMALL, "model_type": "llama", "hidden_size": "big"}, "hidden_size.*'big'"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_facts(folder_with(tmp_path, raw))


def test_places_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_facts(ModelSection(name_or_path=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="contains an adapter"):
        read_model_facts(ModelSection(name_or_path=str(tmp_path)))
    with pytest.raises(ModelError, match="no such model folder"):
        read_model_facts(ModelSection(name_or_path="./nowhere"))
    with pytest.raises(ModelError, match=r"did you mean builtin:qwen2-tiny"):
        read_model_facts(ModelSection(name_or_path="builtin:qwen2-tine"))
    with pytest.raises(ModelError, match=r"no local folder nobody/nothing"):
        read_model_facts(ModelSection(name_or_path="nobody/nothing"))


def test_a_size_that_a_models_own_code_keeps_to_itself_is_asked_for(tmp_path: Path) -> None:
    code = {"model_type": "mystery9000", "auto_map": {"AutoModelForCausalLM": "modeling_mystery.Mystery"}}
    folder = folder_with(tmp_path, {**code, "vocab_size": 64, "num_attention_heads": 2})
    with pytest.raises(ModelError, match="hidden_size, num_hidden_layers are missing") as caught:
        read_model_facts(folder.model_copy(update={"trust_remote_code": True}))
    assert "add hidden_size and num_hidden_layers to config.json" in caught.value.remedy
