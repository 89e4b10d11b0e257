"""Compares what decides a folder's tokens and its sums beside the weights: chat template, tokenizer, config.json."""

from __future__ import annotations

import json
import re
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from transformers import PreTrainedConfig

from halftune.verify.targets import Finding

# keys of config.json that change no number, or that other findings name
_FREE = {"dtype", "torch_dtype", "transformers_version", "use_cache", "architectures", "_name_or_path", "vocab_size"}
_FREE |= {"tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "_attn_implementation"}
_OF_TRAINING = ("dropout", "_pdrop", "initializer_range", "aux_loss_coef", "output_router_logits")  # ends of such keys
_WINDOWS = {"max_window_layers", "use_sliding_window", "sliding_window"}
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # tags that mark what is trained
# texts that show how a tokenizer normalises and splits
_TRIED = (
    "é e\u0301 Ａ ﬁ",
    "12345 3.14",
    " a  b\n\n\tc ",
    "don't I'LL",
    "日本語",
    "🙂",
    "[1,2];\r\n",
    "<|im_end|> </s>",
)
_OF_SUMS = {"is_decoder", "add_cross_attention"}  # of the keys that all models have


def of_configs(expected: Any, model: Any) -> list[str]:
    """Keys of config.json that reach the model and differ, with both values.

    Args:
        expected, model: configs of transformers.
    """
    configs = [one.get_text_config() for one in (expected, model)]
    ours, theirs = (_reaching(one.to_dict()) for one in configs)
    try:
        known = type(configs[0])().to_dict().keys() - (PreTrainedConfig().to_dict().keys() - _OF_SUMS)
    except (TypeError, ValueError, AttributeError):  # a class without defaults
        known = ours.keys() | theirs.keys()
    longer = "max_position_embeddings"
    if ours.get("rope_parameters") == theirs.get("rope_parameters") and _is_plain(ours) and longer in ours:
        theirs[longer] = min(theirs.get(longer) or 0, ours[longer])  # more room changes no sum
    return [
        f"{key} is {theirs.get(key)} instead of {ours.get(key)}"
        for key in sorted((ours.keys() | theirs.keys()) & known)
        if key not in _FREE and not key.endswith(_OF_TRAINING) and ours.get(key) != theirs.get(key)
    ]


def _reaching(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what its own other keys switch off."""
    layers, rope = config.get("layer_types"), config.get("rope_parameters")
    if layers is not None:  # they say which layers have windows
        off = _WINDOWS if not any("sliding" in str(one) for one in layers) else {"max_window_layers"}
        config = {key: value for key, value in config.items() if key not in off}
    if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
        config["rope_parameters"] = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    if isinstance(act := config.get("hidden_act"), str):
        config["hidden_act"] = {"swish": "silu"}.get(act, act)
    return config


def _is_plain(config: dict[str, Any]) -> bool:
    rope = config.get("rope_parameters")
    return isinstance(rope, dict) and rope.keys() <= {"rope_theta", "partial_rotary_factor"}


def of_templates(ours: Any, theirs: Any) -> list[Finding]:
    """Whether two tokenizers' chat templates are the same program; what differs is rendered by others.

    Args:
        ours, theirs: tokenizers.
    """
    if not ours.chat_template:
        return []
    same = all(
        _program(str(ours.get_chat_template(tools=tools))) == _program(str(theirs.get_chat_template(tools=tools)))
        for tools in (None, [{}])
        if theirs.chat_template
    )
    what = "its chat template is another program, which renders the conversations that were tried alike"
    return [] if same else [Finding("tokens.unknown", what)]


def _program(template: str) -> Any:
    """The syntax tree: without comments, white space control and marks of training."""
    try:
        return Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]).parse(
            _GENERATION.sub("", template)
        )
    except TemplateError:
        return template


def of_tokenizers(ours: Any, theirs: Any) -> list[Finding]:
    """Whether two tokenizers give the same tokens: as files, else for each token's own text and odd ones.

    Args:
        ours, theirs: tokenizers.
    """
    forms = [_form(one) for one in (ours, theirs)]
    if forms[0] and forms[0] == forms[1]:
        return []
    texts = [str(ours.decode([token])) for token in range(len(ours))] + list(_TRIED)
    tokens = [one(texts, add_special_tokens=False)["input_ids"] for one in (ours, theirs)]
    differing = [text for text, first, second in zip(texts, *tokens, strict=True) if first != second]
    if differing:
        what = f"{len(differing)} of {len(texts)} texts have other tokens, for example {differing[0]!r}"
        return [Finding("tokens.differ", what)]
    if forms[0].get("model") and forms[0].get("model") == forms[1].get("model"):
        return []
    return [Finding("tokens.unknown", f"another tokenizer, with the same tokens of {len(texts)} texts")]


def _form(tokenizer: Any) -> dict[str, Any]:
    """The content of tokenizer.json that decides tokens; empty without such a file's form."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    content = json.loads(backend.to_str())
    added = {one["id"]: one for one in content.get("added_tokens", ())}
    return {
        **{key: value for key, value in content.items() if key not in ("truncation", "padding")},
        "added_tokens": added,
    }
