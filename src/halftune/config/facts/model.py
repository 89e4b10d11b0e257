"""Facts about a model from its ``config.json``, as frozen data: all that plans know about a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.architecture import (
    Architecture,
    Tensor,
    architecture_or_reason,
    check_complete,
    prediction_heads,
    total_elements,
)
from halftune.config.facts.config_file import config_file
from halftune.config.facts.families import OWN, Family, check_causal, family_of, is_reward_model, multimodal_class
from halftune.config.facts.folder import read_json
from halftune.config.facts.published import is_published
from halftune.config.facts.refused_values import TokenIds, check_generation, check_values, token_ids
from halftune.config.facts.rwkv7_shape import rwkv7_shape
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
from halftune.config.facts.sizes import attention, dtype_of, experts, grouped, number, sizes_of, without_nulls
from halftune.config.facts.wrapped import unwrapped
from halftune.config.sections.model import ModelSection
from halftune.config.weight_formats import method_of
from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

INNER = ("text_config", "global_config")  # sub-configs of the decoder; global_config is BLT's
_NOT_BUILT = Architecture(text={}, tied=False, towers=(), tensors=())


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model as its config describes it.

    Attributes:
        name_or_path: the value in the config.
        model_type: transformers' ``model_type``.
        dtype: the checkpoint's dtype, ``"bf16" | "fp16" | "fp32" | "fp64"``, or None if unknown; the most frequent one.
        stored: tensor name → dtype, from the weights' headers; empty if they are not available.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: the usual sizes.
        tie_word_embeddings: whether head and embedding are tied; False if the files contain a different head.
        num_parameters: number of weights, from safetensors headers if available, else of the architecture.
        counted_in: ``headers``, ``architecture``, ``catalogue`` (as ``architecture``, from a config.json that came with
            halftune); ``sizes`` if transformers cannot build it, ``unbuilt`` if that was not possible this time, ``own
            code`` for remote code: estimated from a Llama of these sizes.
        linear_layers: number of layers with linear attention or a state-space mixer (0: softmax attention only).
        sliding_window: window of local layers in tokens, or None.
        softcap: attention logit soft-capping value, or None.
        sinks: whether attention has learned sink logits (gpt_oss).
        attention_dropout: dropout on attention weights in training.
        num_experts, num_experts_per_token: 0 for dense models.
        quantization: quantisation method of the checkpoint, or None.
        quantized_experts: whether fused experts are quantised, too.
        max_position_embeddings: maximum number of positions.
        window_layers: number of layers with a sliding window.
        tensors: every weight tensor by name and shape; empty if the architecture cannot be built.
        raw: the whole parsed config.json (nested text_config already resolved into the fields above).
        multimodal: class that loads it with its towers; empty for a plain language model, and with ``parts: text``.
        tower_parameters: number of weights of its towers, not included in ``num_parameters``.
        tower_tensors: the weights of its towers by name and shape, as ``tensors``.
        attention_lacks: as ``Architecture.lacks``.
        expert_modules: linear layers that peft treats as experts, on which it has no DoRA.
        prediction_heads: names of its tensors for multi-token prediction, which transformers does not load.
        text_type: ``model_type`` of the decoder, if it is a part of the model.
        scores: whether the checkpoint is a reward model: its output layer has one output.
        teacher: the model that this one learns from, with ``method: distill``.
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
    counted_in: Literal["headers", "architecture", "catalogue", "sizes", "unbuilt", "own code"]
    linear_layers: int = 0
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    attention_dropout: float = 0.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    quantization: str | None = None
    quantized_experts: bool = False
    max_position_embeddings: int | None = None
    window_layers: int = 0
    tensors: tuple[Tensor, ...] = ()
    raw: dict | None = None
    tokens: TokenIds | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    multimodal: str = ""
    tower_parameters: int = 0
    tower_tensors: tuple[Tensor, ...] = ()
    attention_lacks: tuple[str, ...] = ()
    expert_modules: tuple[str, ...] = ()
    prediction_heads: tuple[str, ...] = ()
    text_type: str = ""
    scores: bool = False
    teacher: ModelFacts | None = None

    @property
    def num_parameters_exact(self) -> bool:
        """Whether ``num_parameters`` is exact."""
        return self.counted_in in ("headers", "architecture", "catalogue")

    @property
    def family(self) -> Family:
        """The row of the model type, or of its decoder's."""
        return family_of(self.model_type, self.text_type)

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The decoder's settings in config.json: ``text_config``, or the whole."""
        return (self.raw or {}).get("text_config") or self.raw or {}

    @property
    def likely_tensors(self) -> tuple[Tensor, ...]:
        """``tensors``, or those of a Llama of these sizes if the architecture cannot be built."""
        return self.tensors or tuple(_llama(self))


def read_model_facts(model: ModelSection) -> ModelFacts:
    """Read facts about a model from its config.json and, in a local folder, the headers of its weights.

    Raises:
        ModelError: config.json is missing or invalid, or not of a causal language model.
    """
    name = model.name_or_path
    if name.startswith("builtin:"):
        return _builtin(model)
    file = config_file(model)
    raw = read_json(file)
    if not isinstance(raw.get("model_type"), str):
        what, remedy = "config.json has no model_type", "use a transformers checkpoint"
        raise ModelError(what, where=str(file), remedy=remedy, code="model.config_incomplete")
    raw, trusted = unwrapped(raw), model.trust_remote_code
    multimodal = multimodal_class(raw, model.parts, trust_remote_code=trusted, where=str(file))
    check_causal(raw, where=str(file), trust_remote_code=trusted, multimodal=bool(multimodal))
    own_code = trusted and "auto_map" in raw
    check_values(raw, where=str(file), own_code=own_code)
    check_generation(file.parent)
    headers = read_headers(file.parent)
    apart = bool(headers) and has_head_of_its_own(file.parent)
    try:
        facts = facts_from_config(
            raw, name, headers=headers, head_apart=apart, where=str(file), multimodal=multimodal, own_code=own_code
        )
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        remedy = "download the file again, or restore it"
        what = f"a value has an unexpected type: {error}"
        raise ModelError(what, where=str(file), remedy=remedy, code="model.config_invalid") from error
    language, towers = split_towers(headers)
    if headers and not facts.quantization and not facts.num_experts:  # experts are stored separately and merged on load
        check_complete(language if multimodal else headers, facts.tensors, where=str(file.parent))
    left = headers.keys() - (towers.keys() if isinstance(raw.get("text_config"), dict) else set())
    heads = prediction_heads(sorted(left), facts.num_layers)
    tokens, scores = token_ids(model, file.parent), is_reward_model(raw)
    counted_in = "catalogue" if is_published(file) and facts.counted_in == "architecture" else facts.counted_in
    return replace(facts, tokens=tokens, prediction_heads=tuple(heads), scores=scores, counted_in=counted_in)


def _builtin(model: ModelSection) -> ModelFacts:
    name, known = model.name_or_path, {f"builtin:{key}": raw for key, raw in BUILTIN_MODELS.items()}
    if name not in known:
        what, remedy = f"unknown model {name}", did_you_mean(name, known)
        raise ModelError(what, where="model.name_or_path", remedy=remedy, code="core.unknown_builtin")
    raw = unwrapped(known[name])
    towers = multimodal_class(raw, model.parts, trust_remote_code=False, where=name)
    return replace(facts_from_config(raw, name, multimodal=towers), tokens=token_ids(model, None))


def facts_from_config(
    raw: dict[str, Any],
    name: str,
    *,
    headers: Headers | None = None,
    head_apart: bool = False,
    where: str = "",
    multimodal: str = "",
    own_code: bool = False,
) -> ModelFacts:
    """Return facts from a parsed config.json.

    Args:
        raw: the parsed config.json.
        name: the model's name in the config.
        headers: from ``read_headers``; if given, they determine dtype and number of weights.
        head_apart: the files contain an untied head, whatever ``tie_word_embeddings`` says.
        where: the file, for errors.
        multimodal: the class that loads it with its towers.
        own_code: whether remote code builds the model: then the architecture is not built here.

    Raises:
        ModelError: a size is missing or not a number, or the quantisation method of the weights is missing.
    """
    where = where or name
    loaded = _untied(raw) if head_apart else raw
    found = "own code" if own_code else architecture_or_reason(loaded, multimodal=bool(multimodal), where=where)
    built = found if isinstance(found, Architecture) else None
    parts = built or _NOT_BUILT
    nested, text = _decoder(loaded, parts.text, outer=bool(multimodal))
    model_type = str(text.get("model_type"))
    if model_type in OWN:
        rwkv7_shape(text)
    sizes, family = sizes_of(text, where, built), family_of(raw.get("model_type"), model_type)
    language, towers = headers or {}, Headers()
    if nested or multimodal:
        language, towers = split_towers(language)
    facts = ModelFacts(
        name_or_path=name,
        model_type=str(raw.get("model_type")),
        text_type=model_type,
        dtype=main_format(language) or dtype_of(text),
        **sizes,
        num_parameters=0,
        counted_in="architecture" if isinstance(found, Architecture) else found,
        **attention(text, family, sizes["num_layers"], where),
        **experts(text, where),
        quantization=_quantization(text, language, where),
        max_position_embeddings=number(text, ("max_position_embeddings", "n_positions"), where),
        tensors=parts.tensors,
        raw=raw,
        stored=stored_formats(language),
        multimodal=multimodal,
        tower_parameters=_elements(towers) or total_elements(parts.towers),
        tower_tensors=parts.towers,
        attention_lacks=parts.lacks,
        expert_modules=parts.experts,
    )
    return _counted(facts, language)


def _elements(headers: Headers) -> int:
    return sum(math.prod(shape) for _, shape in headers.values())


def _counted(facts: ModelFacts, headers: Headers) -> ModelFacts:
    """Set the number of weights: from the files, else the architecture, else a Llama."""
    counted = 0 if facts.quantization else count_parameters(headers, tied=facts.tie_word_embeddings)
    if counted:
        return replace(facts, num_parameters=counted, counted_in="headers")
    return replace(facts, num_parameters=total_elements(facts.likely_tensors))


def _untied(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a model with an untied head."""
    inner = {name: {**raw[name], "tie_word_embeddings": False} for name in INNER if isinstance(raw.get(name), dict)}
    return {**raw, **inner, "tie_word_embeddings": False}


def _decoder(raw: dict[str, Any], defaults: dict[str, Any], *, outer: bool) -> tuple[bool, dict[str, Any]]:
    """Whether the decoder is a sub-model, and its settings with the defaults of its type.

    ``outer``: the multimodal class is loaded, which decides whether the head is tied.
    """
    inner = next((raw[name] for name in INNER if isinstance(raw.get(name), dict)), {})
    whole, own = without_nulls(raw), without_nulls(inner)
    text = {**whole, **defaults, **own} if inner else {**defaults, **grouped(whole), **whole}
    if outer and "tie_word_embeddings" in raw:
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return bool(inner), text


def _quantization(text: dict[str, Any], headers: Headers, where: str) -> str | None:
    method = method_of(text.get("quantization_config"), where)
    if not method and (found := quantised_weight(headers)):
        what = f"{found[0]} is stored as {found[1]}, but config.json has no quantization_config"
        remedy = "use a checkpoint in bf16, fp16 or fp32, or one whose config.json names its quantisation"
        raise ModelError(what, where=where, remedy=remedy, code="model.quantization_unknown")
    return method


def _llama(facts: ModelFacts) -> Iterator[Tensor]:
    """The weights of a Llama of these sizes, with experts if there are any."""
    layers, hidden, place = tuple(range(facts.num_layers)), facts.hidden_size, "model.layers.*"
    query, key = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    yield Tensor("model.embed_tokens.weight", (facts.vocab_size, hidden), (), "embedding")
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{place}.{name}.weight", (hidden,), layers)
    for name, shape in (("q", (query, hidden)), ("k", (key, hidden)), ("v", (key, hidden)), ("o", (hidden, query))):
        yield Tensor(f"{place}.self_attn.{name}_proj.weight", shape, layers, "linear")
    width, experts = facts.intermediate_size, facts.num_experts
    if experts:
        said = (facts.raw or {}).get("moe_intermediate_size")
        width = said if isinstance(said, int) else width
        yield Tensor(f"{place}.mlp.gate.weight", (experts, hidden), layers)
        yield Tensor(f"{place}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden), layers)
        yield Tensor(f"{place}.mlp.experts.down_proj", (experts, hidden, width), layers)
    else:
        for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            yield Tensor(f"{place}.mlp.{name}_proj.weight", shape, layers, "linear")
    yield Tensor("model.norm.weight", (hidden,))
    if not facts.tie_word_embeddings:
        yield Tensor("lm_head.weight", (facts.vocab_size, hidden), (), "head")
