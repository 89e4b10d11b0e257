"""Facts about model types that config.json does not contain, one row each, and which types are supported.

Most types need no row. The suffix ``_text`` of a model type is ignored. For a model with towers, the row of the outer
type takes precedence over the decoder's. Nothing here imports transformers.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from halftune.config.facts.media import AUDIO_FAMILIES, REFUSED
from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

# Encoders that transformers can use as causal language models, by a value in their config:
ONE_WAY = (("is_decoder", True), ("causal", True), ("attn_type", "uni"))  # of BERT's kin, of XLM, of XLNet
DECODERS = "a Llama, Qwen, Mistral or Gemma"


# Classes with a head for labels instead of tokens.
_LABELS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|RewardModel)$")


def _models() -> Path:
    """The folder of transformers' models; one that does not exist if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places or ("transformers",)))) / "models"


@cache
def _classes(mapping: str) -> dict[str, str]:
    """Return one of transformers' mappings, model type → class name; empty if its source cannot be read.

    Read from transformers' source, since importing it takes seconds.
    """
    source = _models() / "auto" / "modeling_auto.py"
    if not source.is_file():
        return {}
    block = re.search(rf"^{mapping}\b.*?^\)", source.read_text(encoding="utf-8"), re.M | re.S)
    return dict(re.findall(r'\(\s*"([^"]+)",\s*"([^"]+)"', block.group(0))) if block else {}


def causal_types() -> frozenset[str]:
    """Return the model types with a causal language model; empty if unknown."""
    known = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return frozenset(known) | OWN if known else frozenset()


def multimodal_class(raw: dict[str, Any], parts: str, *, trust_remote_code: bool, where: str) -> str:
    """Return the class that loads a checkpoint with its towers; empty for a plain language model.

    config.json decides: many model types have a class with towers and one for text only, with other weight names.

    Args:
        raw: the parsed config.json.
        parts: ``model.parts``.
        trust_remote_code: whether remote code builds the model.
        where: the file, for the error.

    Raises:
        ModelError: ``parts: text`` is set, and the model type has no class for text only.
    """
    model_type = str(raw.get("model_type"))
    whole = _class_with_towers(model_type)
    text = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")
    if not whole or _brings_code(raw, trust_remote_code) or (text and not isinstance(raw.get("text_config"), dict)):
        return ""
    if parts == "text":
        if text not in ("", whole):
            return ""
        what = f"transformers has no text-only class of {model_type}"
        remedy = "set model.parts: all (the towers are frozen)"
        raise ModelError(what, where=where, remedy=remedy, code="model.no_text_class")
    named = raw.get("architectures")
    return "" if isinstance(named, list) and text in named and whole not in named else whole


def _class_with_towers(model_type: str) -> str:
    """The class of a language model with towers; empty if there is none, or if it predicts no tokens."""
    if family_of(model_type).kind == "other":
        return ""
    found = _classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES").get(model_type, "")
    if found or model_type not in AUDIO_FAMILIES:
        return found
    mappings = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    return next((one[model_type] for one in map(_classes, mappings) if model_type in one), "")


def other_class(raw: dict[str, Any], multimodal: str) -> tuple[str, str] | None:
    """Return the class in config.json and the loaded class of transformers, if they differ.

    Args:
        raw: the parsed config.json.
        multimodal: as :func:`multimodal_class` gives it.
    """
    named, model_type = raw.get("architectures"), str(raw.get("model_type"))
    loaded = multimodal or _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")
    if not loaded or not isinstance(named, list) or not named:
        return None
    whole = _classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES").get(model_type, loaded)  # model.parts: text
    expected = {loaded.lower(), whole.lower()}
    return None if expected & {str(name).lower() for name in named} else (str(named[0]), loaded)


def is_reward_model(raw: dict[str, Any]) -> bool:
    """Whether a config.json is of a sequence classifier with one output."""
    named, labels = raw.get("architectures"), raw.get("id2label")
    outputs = len(labels) if isinstance(labels, dict) else raw.get("num_labels")
    return outputs == 1 and isinstance(named, list) and str(named[:1]).endswith("ForSequenceClassification']")


@cache
def scoring_class(model_type: str) -> str:
    """The class of transformers that scores sequences with a model of this type, by a layer called ``score``.

    Empty if there is none. Read from transformers' source, since importing it takes seconds.
    """
    name = _classes("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES").get(model_type, "")
    folder = model_type.replace("-", "_")
    source = _models() / folder / f"modeling_{folder}.py"
    if not name or not source.is_file():
        return name
    found = re.search(rf"^class {name}\(.*?(?=^class |\Z)", source.read_text(encoding="utf-8"), re.M | re.S)
    return "" if found and "score" not in found[0] and "Generic" not in found[0].splitlines()[0] else name


def check_causal(raw: dict[str, Any], *, where: str, trust_remote_code: bool, multimodal: bool = False) -> None:
    """Refuse models that are not causal language models, or that cannot be loaded.

    Args:
        raw: the parsed config.json.
        where: the file, for the error.
        trust_remote_code: whether remote code may run.
        multimodal: whether a class with towers loads it, see :func:`multimodal_class`.

    Raises:
        ModelError: an encoder, an encoder-decoder, a classifier, an unknown model type, or one that requires untrusted
            remote code.
    """
    if found := _not_causal(raw, multimodal=multimodal):
        what, remedy = found
        raise ModelError(what, where=where, remedy=remedy, code="model.not_causal")
    if not multimodal and not _brings_code(raw, trust_remote_code):
        _check_known(raw, where)


def _not_causal(raw: dict[str, Any], *, multimodal: bool) -> tuple[str, str] | None:
    """What the model is instead of a causal language model, and the remedy; None if it is one, or unknown."""
    model_type, inner, named = raw.get("model_type"), raw.get("text_config"), raw.get("architectures")
    kind = family_of(model_type).kind
    within = family_of(inner.get("model_type")).kind if multimodal and isinstance(inner, dict) else ""
    if raw.get("is_encoder_decoder", kind == "encoder-decoder") or within == "encoder-decoder":
        what = f"{model_type} is an encoder-decoder; only causal language models are supported"
        return what, f"use a decoder, such as {DECODERS}; for {model_type} use transformers' Seq2SeqTrainer"
    if kind == "encoder" and not any(raw.get(key) == value for key, value in ONE_WAY):
        return f"{model_type} is an encoder, not a causal language model", f"use a decoder, such as {DECODERS}"
    if multimodal and kind == "pictures":
        what = f"transformers' {model_type} requires images; only text training is supported"
        return what, f"use a language model, such as {DECODERS}"
    labels = next(filter(_LABELS.search, map(str, named if isinstance(named, list) else ())), "")
    if labels and not is_reward_model(raw):
        what = f"the checkpoint is a {labels}, with a head for labels instead of tokens"
        return what, "use its base language model"
    return None


def _check_known(raw: dict[str, Any], where: str) -> None:
    """Refuse a model type for which transformers has no causal language model."""
    model_type, known = str(raw.get("model_type")), causal_types()
    if not known or model_type in known:
        return
    if raw.get("auto_map"):
        remedy = "review the code, then set model.trust_remote_code: true and model.revision"
        what = f"{model_type} requires the checkpoint's remote code"
        raise ModelError(what, where=where, remedy=remedy, code="model.remote_code_required")
    if _has_other_uses(model_type):
        what = f"transformers has no causal language model for {model_type}"
        if model_type in REFUSED:
            what = f"{model_type} is not supported: {REFUSED[model_type]}"
        raise ModelError(what, where=where, remedy=f"use a language model, such as {DECODERS}", code="model.not_causal")
    remedy = did_you_mean(model_type, known)
    if not remedy.startswith("did"):
        remedy = "try a newer transformers version"
    raise ModelError(f"unknown model type {model_type!r}", where=where, remedy=remedy, code="model.unknown_type")


def _brings_code(raw: dict[str, Any], trust_remote_code: bool) -> bool:
    """Whether trusted code of the checkpoint builds the model."""
    return trust_remote_code and "AutoModelForCausalLM" in (raw.get("auto_map") or {})


def _has_other_uses(model_type: str) -> bool:
    """Whether the installed transformers has a folder for this model type."""
    name = model_type.replace("-", "_")
    return name.isidentifier() and (_models() / name).is_dir()


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        kind: ``encoder`` for bidirectional attention (unless ``model_types.ONE_WAY`` applies), ``encoder-decoder``
            (unless its config says otherwise), ``pictures`` if the forward pass requires images, ``other`` if it does
            not predict the next token (diffusion, classification, robot actions).
        attention: ``interface`` if softmax attention uses transformers' AttentionInterface, ``own`` for own attention
            code, ``none`` without softmax attention.
        sinks: whether attention has learned sink logits.
        hybrid: whether some layers are linear attention, state-space or convolution; config.json may not list them.
        operators: our operators for these layers, in call order; empty if they cannot be used.
        fla: whether flash-linear-attention has kernels for these layers.
        packs: whether these layers get the sample boundaries of packed rows.
        mixes: what else passes information between the samples of a packed row, as a sentence.
        positions: ``rotary``, ``learned`` or ``alibi``; empty if config.json tells.
        overflows_fp16: trained in bf16, with activations beyond fp16's 65,504.
        keep_fp32: patterns of parameters that stay fp32 in every storage dtype.
        why_fp32: the reason; empty if the model's code defines them in fp32.
        lora_exclude: linear layers without adapters: peft refuses those whose weights fused kernels read, or their code
            groups the inputs.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder", "pictures", "other"] = "decoder"
    attention: Literal["interface", "own", "none"] = "interface"
    sinks: bool = False
    hybrid: bool = False
    operators: tuple[str, ...] = ()
    fla: bool = False
    packs: bool = False
    mixes: str = ""
    positions: Literal["", "rotary", "learned", "alibi"] = ""
    overflows_fp16: bool = False
    keep_fp32: tuple[str, ...] = ()
    why_fp32: str = ""
    lora_exclude: tuple[str, ...] = ()


_CONV = ("causal_conv1d",)
_DELTA, _KDA, _SSD = (*_CONV, "gated_delta_rule"), (*_CONV, "kda"), (*_CONV, "ssd")
_D = r"\.D$"  # of a state-space mixer
_MIXER_D, _MAMBA_D = (rf"\.mixer{_D}",), (rf"\.mamba{_D}",)
_READ_PAST = ("out_proj", "conv1d")
_DELTA_RULE = Family(hybrid=True, operators=_DELTA, fla=True, packs=True)
_DELTA_PER_CHANNEL = Family(hybrid=True, operators=_KDA, fla=True, packs=True)
_CONVOLUTION = Family(hybrid=True, operators=_CONV, packs=True)
_ROTARY = Family(positions="rotary")
_OWN = Family(attention="own")
_LEARNED = Family(positions="learned")
_OVERFLOWS = Family(overflows_fp16=True)

FAMILIES: dict[str, Family] = {
    # softmax attention
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _LEARNED),
    **dict.fromkeys(("llama", "mistral", "phi", "phi3", "qwen2", "gpt_neox", "olmo", "stablelm", "qwen2_moe"), _ROTARY),
    "mixtral": _ROTARY,
    "gpt_oss": Family(sinks=True, keep_fp32=(r"(^|\.)(norm|input_layernorm|post_attention_layernorm)\.weight$",)),
    "mimo_v2_flash": Family(sinks=True),
    "deepseek_v4": Family(lora_exclude=("o_a_proj",)),
    **dict.fromkeys(("gemma", "gemma2"), Family(positions="rotary", overflows_fp16=True)),
    **dict.fromkeys(
        ("gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "vaultgemma"),
        _OVERFLOWS,
    ),
    # own attention code
    **dict.fromkeys(
        ("codegen", "falcon", "fuyu", "git", "gpt_neo", "gpt_neox_japanese", "gptj", "openai-gpt", "trocr", "xglm"),
        _OWN,
    ),
    **dict.fromkeys(("bloom", "mpt"), Family(attention="own", positions="alibi")),
    # linear attention, state spaces, convolutions
    "qwen3_next": Family(hybrid=True, operators=_DELTA, fla=True, packs=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "olmo_hybrid"), _DELTA_RULE),
    "qwen4_exp": Family(
        hybrid=True,
        operators=_DELTA,
        fla=True,
        mixes="the indexer of qwen4_exp's attention selects keys of the whole row",
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _DELTA_PER_CHANNEL),
    "glm5_next": Family(hybrid=True, operators=_KDA, fla=True),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTION),
    "mamba": Family(attention="none", hybrid=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "falcon_mamba": Family(attention="none", hybrid=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "mamba2": Family(
        attention="none", hybrid=True, operators=_SSD, packs=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST
    ),
    "nemotron_h": Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "falcon_h1": Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MAMBA_D, lora_exclude=_READ_PAST),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "zamba2"), Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MAMBA_D)
    ),
    **dict.fromkeys(("jamba", "minimax", "zamba"), Family(hybrid=True)),
    "recurrent_gemma": Family(hybrid=True, overflows_fp16=True),
    **dict.fromkeys(("rwkv", "xlstm"), Family(attention="none", hybrid=True)),
    "rwkv7": Family(
        attention="none",
        hybrid=True,
        operators=("rwkv7",),
        packs=True,
        keep_fp32=(r"\.attn\.(k_k|k_a|r_k)$", r"\.attn\.[wav]_lora\.lora\.2\.bias$"),
        why_fp32="the bias of the decay and the vectors that scale keys are small, and act on every token",
    ),
    # encoders; some can be configured as causal
    **dict.fromkeys(
        (
            *("albert", "bert", "bert-generation", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
            *("electra", "ernie", "esm", "eurobert", "flaubert", "modernbert", "mpnet", "roberta", "roc_bert", "xmod"),
            *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        ),
        Family(kind="encoder"),
    ),
    **dict.fromkeys(
        ("big_bird", "cpmant", "megatron-bert", "reformer", "rembert", "roformer", "xlm", "xlnet"),
        Family(kind="encoder", attention="own"),
    ),
    # encoder-decoders
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5"),
            *("m2m_100", "marian", "mbart", "moonshine", "nllb-moe", "pegasus", "pegasus_x", "plbart", "rag", "udop"),
            *("seamless_m4t", "seamless_m4t_v2", "speech-encoder-decoder", "speech_to_text", "speecht5"),
            *("switch_transformers", "vision-encoder-decoder", "whisper"),
        ),
        Family(kind="encoder-decoder"),
    ),
    **dict.fromkeys(("mvp", "prophetnet"), Family(kind="encoder-decoder", attention="own")),
    **dict.fromkeys(("mt5", "t5", "t5gemma", "t5gemma2", "umt5"), Family(kind="encoder-decoder", overflows_fp16=True)),
    # the forward pass requires images
    **dict.fromkeys(
        ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pix2struct"),
        Family(kind="pictures"),
    ),
    **dict.fromkeys(("diffusion_gemma", "evolla", "pi0", "shieldgemma2"), Family(kind="other")),
}
OWN = frozenset({"rwkv7"})  # implemented in halftune, not in transformers
_PLAIN = Family()


def family_of(*model_types: object) -> Family:
    """Return the row of the first model type that has one; a plain decoder's if none has."""
    return next((FAMILIES[name] for name in _spelt(model_types) if name in FAMILIES), _PLAIN)


def _spelt(model_types: Iterable[object]) -> Iterator[str]:
    for name in map(str, model_types):
        yield name
        yield name.removesuffix("_text")
