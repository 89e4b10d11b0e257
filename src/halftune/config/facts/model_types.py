"""Supported model types, decided without importing transformers."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from halftune.config.facts.families import OWN, family_of
from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

# Encoders that transformers can use as causal language models, by a value in their config:
ONE_WAY = (("is_decoder", True), ("causal", True), ("attn_type", "uni"))  # of BERT's kin, of XLM, of XLNet
DECODERS = "a Llama, Qwen, Mistral or Gemma"


# Classes with a head for labels instead of tokens.
_LABELS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|RewardModel)$")


@cache
def _classes(mapping: str) -> dict[str, str]:
    """Return one of transformers' mappings, model type → class name; empty if its source cannot be read.

    Read from transformers' source, since importing it takes seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(next(iter(spec.submodule_search_locations))) / "models" / "auto" / "modeling_auto.py"
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
    whole = _classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES").get(model_type, "")
    text = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")
    if (
        not whole
        or family_of(model_type).kind == "other"
        or (text and not isinstance(raw.get("text_config"), dict))
        or (trust_remote_code and "AutoModelForCausalLM" in (raw.get("auto_map") or {}))
    ):
        return ""
    if parts == "text":
        if text in ("", whole):
            what = f"transformers has no text-only class of {model_type}"
            raise ModelError(
                what, where=where, remedy="set model.parts: all (the towers are frozen)", code="model.no_text_class"
            )
        return ""
    named = raw.get("architectures")
    return "" if isinstance(named, list) and text in named and whole not in named else whole


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
    model_type = raw.get("model_type")
    inner = raw.get("text_config") if multimodal else None
    inner_type = inner.get("model_type") if isinstance(inner, dict) else None
    kind = family_of(model_type).kind
    pair = kind == "encoder-decoder"
    if raw.get("is_encoder_decoder", pair) or family_of(inner_type).kind == "encoder-decoder":
        what = f"{model_type} is an encoder-decoder; only causal language models are supported"
        remedy = f"use a decoder, such as {DECODERS}; for {model_type} use transformers' Seq2SeqTrainer"
        raise ModelError(what, where=where, remedy=remedy, code="model.not_causal")
    if kind == "encoder" and not any(raw.get(key) == value for key, value in ONE_WAY):
        what = f"{model_type} is an encoder, not a causal language model"
        raise ModelError(what, where=where, remedy=f"use a decoder, such as {DECODERS}", code="model.not_causal")
    if multimodal and kind == "pictures":
        what = f"transformers' {model_type} requires images; only text training is supported"
        raise ModelError(what, where=where, remedy=f"use a language model, such as {DECODERS}", code="model.not_causal")
    named = raw.get("architectures")
    if isinstance(named, list) and (labels := [name for name in named if _LABELS.search(str(name))]):
        what = f"the checkpoint is a {labels[0]}, with a head for labels instead of tokens"
        raise ModelError(what, where=where, remedy="use its base language model", code="model.not_causal")
    if multimodal or ("AutoModelForCausalLM" in (raw.get("auto_map") or {}) and trust_remote_code):
        return
    known = causal_types()
    if not known or model_type in known:
        return
    if raw.get("auto_map"):
        remedy = "review the code, then set model.trust_remote_code: true and model.revision"
        what = f"{model_type} requires the checkpoint's remote code"
        raise ModelError(what, where=where, remedy=remedy, code="model.remote_code_required")
    if _has_other_uses(str(model_type)):
        what = f"transformers has no causal language model for {model_type}"
        raise ModelError(what, where=where, remedy=f"use a language model, such as {DECODERS}", code="model.not_causal")
    remedy = did_you_mean(str(model_type), known)
    if not remedy.startswith("did"):
        remedy = "try a newer transformers version"
    what = f"unknown model type {model_type!r}"
    raise ModelError(what, where=where, remedy=remedy, code="model.unknown_type")


def _has_other_uses(model_type: str) -> bool:
    """Whether the installed transformers has a folder for this model type."""
    name = model_type.replace("-", "_")
    spec = importlib.util.find_spec("transformers")
    if not name.isidentifier() or spec is None or not spec.submodule_search_locations:
        return False
    return (Path(next(iter(spec.submodule_search_locations))) / "models" / name).is_dir()
