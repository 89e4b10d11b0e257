"""What a model's ``config.json`` says, as frozen data: the only thing about a model that the plan may look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.config_file import config_file
from halftune.config.facts.families import (
    LLAMA_LIKE,
    OTHERS,
    defaults_of,
    linear_layers,
    llama_like,
    named_within,
    tensors_of,
)
from halftune.config.facts.folder import read_json
from halftune.config.facts.missing_weights import check_complete
from halftune.config.facts.model_types import check_causal, multimodal_class
from halftune.config.facts.refused_values import check_values
from halftune.config.facts.rwkv7_shape import NULL_SAYS
from halftune.config.facts.safetensors_headers import (
    Headers,
    count_parameters,
    has_head_of_its_own,
    main_format,
    quantised_weight,
    read_headers,
    split_towers,
    stored_formats,
)
from halftune.config.facts.token_ids import TokenIds, token_ids
from halftune.config.facts.weights import Sizes, Tensor
from halftune.config.quantised import method_of
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

# The same size under the names that configs have had for it.
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
WIDTH = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim", "moe_intermediate_size")
VOCABULARY = ("vocab_size",)
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_top_k")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
FORMATS |= {"float64": "fp64", "double": "fp64"}
SINKS = {"gpt_oss", "mimo_v2_flash"}
# Families with state-space, convolution or linear-attention layers whose config may not list the layers' types.
NOT_ONLY_SOFTMAX = {
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "glm5_next",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
    "recurrent_gemma",
    "rwkv",
    "rwkv7",
    "xlstm",
    "zamba",
    "zamba2",
}


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model as its config describes it.

    Attributes:
        name_or_path: as the user wrote it.
        model_type: transformers' ``model_type``.
        dtype: the checkpoint's own dtype, ``"bf16" | "fp16" | "fp32" | "fp64"``, or None where nothing says; of several
            that which most numbers have.
        stored: tensor name → dtype, from the weights' headers; empty where they are not at hand.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: the usual sizes.
        tie_word_embeddings: whether the head is the embedding; where the files hold another head, it is not.
        num_parameters: all weights; exact where safetensors headers are at hand, else computed from the sizes.
        num_parameters_exact: which of the two.
        linear_layers: number of layers with linear attention or a state-space mixer (0: softmax attention only).
        sliding_window: window of local layers in tokens, or None.
        softcap: attention logit soft-capping value, or None.
        sinks: whether attention has learned sink logits (gpt_oss).
        attention_dropout: dropout on attention weights in training.
        num_experts, num_experts_per_token: 0 for dense models.
        quantization: quantisation method of the checkpoint, or None.
        max_position_embeddings: longest position the model was made for.
        window_layers: number of layers with the sliding window (0 without one).
        tensors: every weight tensor by name and shape where the family is described, else empty.
        raw: the whole parsed config.json (nested text_config already resolved into the fields above).
        multimodal: name of the class that loads it with its towers; empty for a plain language model, and where the
            language model is asked for alone.
        tower_parameters: weights of the towers in its files, which are not among ``num_parameters``.
    """

    name_or_path: str
    model_type: str
    dtype: str | None
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    num_parameters: int
    num_parameters_exact: bool
    linear_layers: int = 0
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    attention_dropout: float = 0.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    quantization: str | None = None
    max_position_embeddings: int | None = None
    window_layers: int = 0
    tensors: tuple[Tensor, ...] = ()
    raw: dict | None = None
    tokens: TokenIds | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    multimodal: str = ""
    tower_parameters: int = 0

    @property
    def likely_tensors(self) -> tuple[Tensor, ...]:
        """``tensors``, or those of a Llama of these sizes: a stand-in for a family that is not described."""
        if self.tensors:
            return self.tensors
        sizes = Sizes(
            hidden=self.hidden_size,
            layers=self.num_layers,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            vocab=self.vocab_size,
            tied=self.tie_word_embeddings,
        )
        return tuple(llama_like("llama", {}, sizes))


def read_model_facts(model: ModelSection) -> ModelFacts:
    """Facts about a model from its config.json (and, in a local folder, the headers of its weights).

    Raises:
        ModelError: there is no config.json, it is damaged, or it describes no causal language model.
    """
    name = model.name_or_path
    if name.startswith("builtin:"):
        known = {f"builtin:{key}": raw for key, raw in BUILTIN_MODELS.items()}
        if name not in known:
            raise ModelError(f"there is no model {name}", where="model.name_or_path", remedy=did_you_mean(name, known))
        return replace(facts_from_config(known[name], name), tokens=token_ids(model, None))
    file = config_file(model)
    raw = read_json(file)
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(
            "config.json names no model_type", where=str(file), remedy="is this a transformers checkpoint?"
        )
    trusted = model.trust_remote_code
    multimodal = multimodal_class(raw, model.parts, trust_remote_code=trusted, where=str(file))
    check_causal(raw, where=str(file), trust_remote_code=trusted, multimodal=bool(multimodal))
    check_values(raw, where=str(file), own_code=trusted and "auto_map" in raw)
    headers = read_headers(file.parent)
    apart = bool(headers) and has_head_of_its_own(file.parent)
    try:
        facts = facts_from_config(raw, name, headers=headers, head_apart=apart, where=str(file), multimodal=multimodal)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        remedy = "the file is damaged: copy or download it again"
        raise ModelError(f"a value has an unexpected kind: {error}", where=str(file), remedy=remedy) from error
    if headers and not facts.quantization and not facts.num_experts:  # experts are stored apart and loaded together
        language, _ = split_towers(headers) if multimodal else (headers, {})
        check_complete(language, facts.tensors, where=str(file.parent))
    return replace(facts, tokens=token_ids(model, file.parent))


def facts_from_config(
    raw: dict[str, Any],
    name: str,
    *,
    headers: Headers | None = None,
    head_apart: bool = False,
    where: str = "",
    multimodal: str = "",
) -> ModelFacts:
    """Facts from a parsed config.json; pure.

    Args:
        raw: the parsed config.json.
        name: what the user wrote for the model.
        headers: as ``read_headers`` gives them; where there are some, they tell the dtype and the exact count.
        head_apart: the files hold a head that is not the embedding: it stays, whatever ``tie_word_embeddings`` says.
        where: the file, for errors.
        multimodal: the class that loads it with its towers.

    Raises:
        ModelError: a size is missing or is not a number; or weights are quantised and the config does not say how.
    """
    where = where or name
    nested, model_type, text = _decoder(raw, outer=bool(multimodal), head_apart=head_apart)
    sizes = _sizes(text, where)
    headers, towers = split_towers(headers) if headers and nested else (headers, {})
    tensors = named_within(tensors_of(model_type, text, sizes), headers or {}, multimodal)
    quantization = _quantization(text, headers or {}, where)
    counted = count_parameters(headers, tied=sizes.tied) if headers and not quantization else 0
    window, experts = _window(text, where), _number(text, EXPERTS, where) or 0
    return ModelFacts(
        name_or_path=name,
        model_type=str(raw.get("model_type")),
        dtype=(main_format(headers) if headers else None) or _dtype(text),
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        vocab_size=sizes.vocab,
        tie_word_embeddings=sizes.tied,
        num_parameters=counted or sum(one.size * one.count for one in tensors) or _estimate(text, sizes),
        num_parameters_exact=bool(counted or tensors),
        linear_layers=_count_linear(model_type, text, sizes.layers),
        sliding_window=window,
        softcap=_number(text, ("attn_logit_softcapping",), where),
        sinks=model_type in SINKS,
        attention_dropout=float(_first(text, ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"), 0.0)),
        num_experts=experts,
        num_experts_per_token=(_number(text, PER_TOKEN, where) or 0) if experts else 0,
        quantization=quantization,
        max_position_embeddings=_number(text, ("max_position_embeddings", "n_positions"), where),
        window_layers=_window_layers(text, sizes.layers) if window else 0,
        tensors=tensors,
        raw=raw,
        stored=stored_formats(headers or {}),
        multimodal=multimodal,
        tower_parameters=sum(math.prod(shape) for _, shape in towers.values()),
    )


def _decoder(raw: dict[str, Any], *, outer: bool, head_apart: bool) -> tuple[bool, str, dict[str, Any]]:
    """Whether the decoder is one part of several, its model type, and its settings with the defaults of that type.

    ``outer``: the class around it is loaded, which ties the head or not. ``head_apart``: the files have another head.
    """
    inner = raw.get("text_config") or raw.get("global_config")  # BLT's trunk, between bytes and bytes
    nested = isinstance(inner, dict)
    text = {**raw, **inner} if nested else raw
    if outer and "tie_word_embeddings" in raw:
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    if head_apart:
        text = {**text, "tie_word_embeddings": False}
    model_type = _text_type(raw, text)
    given = {key: value for key, value in text.items() if value is not None or key in NULL_SAYS.get(model_type, ())}
    return nested, model_type, {**defaults_of(model_type), **_grouped(given), **given}


def _quantization(text: dict[str, Any], headers: Headers, where: str) -> str | None:
    method = method_of(text.get("quantization_config"), where)
    if not method and (found := quantised_weight(headers)):
        what = f"{found[0]} is stored as {found[1]}, and config.json has no quantization_config that says what it means"
        remedy = "take a checkpoint in bf16, fp16 or fp32, or one whose config.json names its quantisation"
        raise ModelError(what, where=where, remedy=remedy)
    return method


def _text_type(raw: dict[str, Any], text: dict[str, Any]) -> str:
    """The family under which the text model is described."""
    for name in (str(text.get("model_type")), f"{raw.get('model_type')}_text", str(raw.get("model_type"))):
        if name in LLAMA_LIKE or name in OTHERS:
            return name
    return str(text.get("model_type"))


def _grouped(text: dict[str, Any]) -> dict[str, Any]:
    """Settings of attention and MLP that stand in groups of their own, as DBRX and MPT have them."""
    groups = [text[name] for name in ("attn_config", "ffn_config") if isinstance(text.get(name), dict)]
    return {key: value for group in groups for key, value in group.items() if value is not None}


def _first(text: dict[str, Any], keys: tuple[str, ...], otherwise: Any) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), otherwise)


def _sizes(text: dict[str, Any], where: str) -> Sizes:
    _check_said(text, where)
    hidden, layers = _whole(text, HIDDEN, where), _whole(text, LAYERS, where, len(_layer_kinds(text)) or None)
    heads = _whole(text, HEADS, where, 1)
    kv_heads = _whole(text, KEY_HEADS, where, heads)
    head_dim = _whole(text, HEAD_DIM, where, hidden // heads)
    if text.get("kv_lora_rank"):  # multi-head latent attention: queries and keys have two parts
        head_dim = int(text.get("qk_nope_head_dim", 0)) + int(text.get("qk_rope_head_dim", 0)) or head_dim
    return Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_whole(text, WIDTH, where, 4 * hidden),
        vocab=_whole(text, VOCABULARY, where),
        tied=bool(text.get("tie_word_embeddings", False)),
    )


def _check_said(text: dict[str, Any], where: str) -> None:
    """Makes sure that a model's own code leaves no size to itself: its defaults are not read, since nothing is run.

    Raises:
        ModelError: names every size that config.json does not.
    """
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": () if _layer_kinds(text) else LAYERS, "vocab_size": VOCABULARY}
    unsaid = [name for name, keys in sizes.items() if keys and _first(text, keys, None) is None]
    if unsaid and text.get("auto_map"):
        remedy = f"write {' and '.join(unsaid)} into config.json: the model's own code has a default or another name"
        raise ModelError(f"{', '.join(unsaid)} {'are' if unsaid[1:] else 'is'} missing", where=where, remedy=remedy)


def _layer_kinds(text: dict[str, Any]) -> list[Any]:
    """One entry a layer, where the config lists them: nemotron_h has no number of layers beside them."""
    kinds = _first(text, ("layers_block_type", "layer_types"), [])
    return kinds if isinstance(kinds, list) else []


def _whole(text: dict[str, Any], keys: tuple[str, ...], where: str, otherwise: int | None = None) -> int:
    value = _first(text, keys, otherwise)
    if isinstance(value, list) and all(isinstance(size, int) for size in value):
        value = max(value, default=None)  # one for each layer: what fits the widest fits all
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        said = "is missing" if value is None else f"is {value!r}, not a positive whole number"
        raise ModelError(f"{keys[0]} {said}", where=where, remedy="fetch the model again")
    return value


def _number(text: dict[str, Any], keys: tuple[str, ...], where: str) -> Any:
    """A number that may be absent."""
    value = _first(text, keys, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ModelError(f"{keys[0]} is {value!r}, not a number", where=where, remedy="fetch it again")
    return value


def _dtype(text: dict[str, Any]) -> str | None:
    return FORMATS.get(str(_first(text, ("dtype", "torch_dtype"), "")).removeprefix("torch."))


def _window(text: dict[str, Any], where: str) -> int | None:
    return _number(text, ("sliding_window",), where) or None if text.get("use_sliding_window", True) else None


def _window_layers(text: dict[str, Any], layers: int) -> int:
    if types := text.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in types[:layers])
    if pattern := text.get("sliding_window_pattern"):
        return sum((layer + 1) % int(pattern) != 0 for layer in range(layers))
    return layers - min(layers, int(text.get("max_window_layers") or 0)) if "max_window_layers" in text else layers


def _count_linear(model_type: str, text: dict[str, Any], layers: int) -> int:
    found = len(linear_layers(text, layers))
    some = model_type in NOT_ONLY_SOFTMAX and not text.get("layer_types")  # its config tells which in a way of its own
    return layers if some and not found else found


def _estimate(text: dict[str, Any], sizes: Sizes) -> int:
    """Parameters of a Llama-like model of these sizes: within a few per cent for most decoders."""
    attention = sizes.hidden * sizes.head_dim * 2 * (sizes.heads + sizes.kv_heads)
    experts = int(_first(text, EXPERTS, 0))
    width = int(text.get("moe_intermediate_size") or sizes.intermediate) if experts else sizes.intermediate
    mlp = 3 * sizes.hidden * width * max(experts, 1) + sizes.hidden * experts
    embedding = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2)
    return embedding + sizes.layers * (attention + mlp + 2 * sizes.hidden) + sizes.hidden
