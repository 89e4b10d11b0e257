"""Which model types can be trained as a causal language model here, told before anything heavy is imported."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.table import did_you_mean

# transformers can bolt a language-model head on these, but their attention looks both ways.
ENCODERS = {
    "albert",
    "bert",
    "camembert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "modernbert",
    "mpnet",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
}


@cache
def causal_types() -> frozenset[str]:
    """Model types that the installed transformers loads as a causal language model; empty where it cannot be told.

    Read from transformers' source: importing it would cost seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(next(iter(spec.submodule_search_locations))) / "models" / "auto" / "modeling_auto.py"
    if not source.is_file():
        return frozenset()
    block = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES\b.*?^\)", source.read_text(encoding="utf-8"), re.M | re.S)
    return frozenset(re.findall(r'\(\s*"([^"]+)",', block.group(0))) if block else frozenset()


def check_causal(raw: dict[str, Any], *, where: str, trust_remote_code: bool) -> None:
    """Refuses what is no causal language model, or not one that can be loaded.

    Raises:
        ModelError: an encoder, an encoder-decoder, a model type that transformers does not know, or one whose code
            comes with the checkpoint and is not trusted.
    """
    model_type = raw.get("model_type")
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"{model_type} is an encoder-decoder, not a causal language model", where=where)
    if model_type in ENCODERS and not raw.get("is_decoder"):
        remedy = "take a decoder, such as a Llama, Qwen, Mistral or Gemma"
        raise ModelError(f"{model_type} is an encoder, not a causal language model", where=where, remedy=remedy)
    if "AutoModelForCausalLM" in (raw.get("auto_map") or {}) and trust_remote_code:
        return
    known = causal_types()
    if not known or model_type in known:
        return
    if raw.get("auto_map"):
        remedy = "read that code, then set model.trust_remote_code: true and model.revision"
        raise ModelError(f"{model_type} needs Python code that comes with the checkpoint", where=where, remedy=remedy)
    remedy = did_you_mean(str(model_type), known)
    if not remedy.startswith("did"):
        remedy = "a newer transformers may know it"
    raise ModelError(f"transformers knows no causal language model of type {model_type!r}", where=where, remedy=remedy)
