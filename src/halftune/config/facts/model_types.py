"""Which model types can be trained as a causal language model here, told before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

# transformers can bolt a language-model head on these, but their attention looks both ways unless ONE_WAY says not.
ENCODERS = {
    "albert",
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "cpmant",
    "data2vec-text",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "flaubert",
    "megatron-bert",
    "modernbert",
    "mpnet",
    "reformer",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
    "xmod",
}
ONE_WAY = (("is_decoder", True), ("causal", True), ("attn_type", "uni"))  # of BERT's kin, of XLM, of XLNet
# Families of text and speech that are an encoder-decoder unless their config says otherwise.
ENCODER_DECODERS = {
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "encoder-decoder",
    "fsmt",
    "led",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "moonshine",
    "mt5",
    "mvp",
    "nllb-moe",
    "pegasus",
    "pegasus_x",
    "plbart",
    "prophetnet",
    "rag",
    "seamless_m4t",
    "seamless_m4t_v2",
    "speech-encoder-decoder",
    "speech_to_text",
    "speecht5",
    "switch_transformers",
    "t5",
    "t5gemma",
    "t5gemma2",
    "udop",
    "umt5",
    "vision-encoder-decoder",
    "whisper",
}
# Image-text models whose forward asks for pictures.
WANT_PICTURES = {"blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2", "pix2struct"}
DECODERS = "a Llama, Qwen, Mistral or Gemma"
OWN = frozenset({"rwkv7"})  # halftune's own, which transformers does not have


@cache
def _classes(mapping: str) -> dict[str, str]:
    """Model type → class name in one of transformers' mappings; empty where its source cannot be read.

    Read from transformers' source: importing it would cost seconds.
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
    """Model types that load as a causal language model; empty where transformers' cannot be told."""
    known = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return frozenset(known) | OWN if known else frozenset()


def multimodal_class(raw: dict[str, Any], parts: str, *, trust_remote_code: bool, where: str) -> str:
    """Name of the class that loads a checkpoint with its towers; empty for a plain language model.

    The class is the one that config.json names: many model types have a class with towers and one for text alone, whose
    weights have other names.

    Args:
        raw: the parsed config.json.
        parts: ``model.parts``.
        trust_remote_code: whether code that comes with the checkpoint makes the model, which then decides.
        where: the file, for the error.

    Raises:
        ModelError: ``parts: text`` is asked for, and the model type has no class for text alone.
    """
    model_type = str(raw.get("model_type"))
    whole = _classes("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES").get(model_type, "")
    text = _classes("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")
    if (
        not whole
        or not isinstance(raw.get("text_config"), dict)
        or (trust_remote_code and "AutoModelForCausalLM" in (raw.get("auto_map") or {}))
    ):
        return ""
    if parts == "text":
        if text in ("", whole):
            what = f"transformers has no class of {model_type} for text alone"
            raise ModelError(what, where=where, remedy="model.parts: all (the towers are frozen)")
        return ""
    if not text and not whole.endswith("ForConditionalGeneration"):  # of other kinds: diffusion, robots' actions
        return ""
    named = raw.get("architectures")
    return "" if isinstance(named, list) and text in named and whole not in named else whole


def check_causal(raw: dict[str, Any], *, where: str, trust_remote_code: bool, multimodal: bool = False) -> None:
    """Refuses what is no causal language model, or not one that can be loaded.

    Args:
        raw: the parsed config.json.
        where: the file, for the error.
        trust_remote_code: whether code that comes with the checkpoint may run.
        multimodal: whether a class with towers loads it, see :func:`multimodal_class`.

    Raises:
        ModelError: an encoder, an encoder-decoder, a model type that transformers does not know, or one whose code
            comes with the checkpoint and is not trusted.
    """
    model_type = raw.get("model_type")
    inner = raw.get("text_config") if multimodal else None
    inner_type = inner.get("model_type") if isinstance(inner, dict) else None
    if raw.get("is_encoder_decoder", model_type in ENCODER_DECODERS) or inner_type in ENCODER_DECODERS:
        what = f"{model_type} is an encoder-decoder, and halftune trains decoders only (causal language models)"
        remedy = f"take a decoder, such as {DECODERS}; for {model_type} itself, transformers has Seq2SeqTrainer"
        raise ModelError(what, where=where, remedy=remedy)
    if model_type in ENCODERS and not any(raw.get(key) == value for key, value in ONE_WAY):
        what = f"{model_type} is an encoder, not a causal language model: each of its tokens sees the later ones"
        raise ModelError(what, where=where, remedy=f"take a decoder, such as {DECODERS}")
    if multimodal and model_type in WANT_PICTURES:
        what = f"transformers' code of {model_type} runs on pictures only, and halftune trains on text"
        raise ModelError(what, where=where, remedy=f"take a language model, such as {DECODERS}")
    if multimodal or ("AutoModelForCausalLM" in (raw.get("auto_map") or {}) and trust_remote_code):
        return
    known = causal_types()
    if not known or model_type in known:
        return
    if raw.get("auto_map"):
        remedy = "read that code, then set model.trust_remote_code: true and model.revision"
        raise ModelError(f"{model_type} needs Python code that comes with the checkpoint", where=where, remedy=remedy)
    if _has_other_uses(str(model_type)):
        what = f"transformers has {model_type}, but not as a causal language model that is trained on text alone"
        raise ModelError(what, where=where, remedy=f"take a language model, such as {DECODERS}")
    remedy = did_you_mean(str(model_type), known)
    if not remedy.startswith("did"):
        remedy = "a newer transformers may know it"
    raise ModelError(f"transformers knows no causal language model of type {model_type!r}", where=where, remedy=remedy)


def _has_other_uses(model_type: str) -> bool:
    """Whether the installed transformers has a folder for this model type."""
    name = model_type.replace("-", "_")
    spec = importlib.util.find_spec("transformers")
    if not name.isidentifier() or spec is None or not spec.submodule_search_locations:
        return False
    return (Path(next(iter(spec.submodule_search_locations))) / "models" / name).is_dir()
