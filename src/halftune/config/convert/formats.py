"""Precision, attention, loaders of quantised weights: what the frameworks say about number formats, in our words."""

from __future__ import annotations

import re
from typing import Any

from halftune.config.convert.draft import Draft, is_off

SWITCHES = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_config")
_STORED = re.compile(r"bnb-?4bit|bnb-?8bit|-4bit$", re.IGNORECASE)
_NOT_TRAINED = re.compile(r"(?i:\b(awq|gptq|aqlm|hqq|eetq|exl2|gguf|int8|nvfp4|fp4)\b)")
_BILLIONS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z])")
QUANTIZED = (
    "quant_config",
    "load_in_4bit",
    "load_in_8bit",
    "quantization_bit",
    "quantization_method",
    "quantization_type",
    "double_quantization",
    "bnb_4bit_quant_type",
    "bnb_4bit_quant_storage",
    "use_bnb_nested_quant",
    "bnb_config_kwargs",
    "bnb_4bit_use_double_quant",
    "quantization_device_map",
)
ATTENTION = {
    "auto": "auto",
    "disabled": "eager",
    "eager": "eager",
    "sdpa": "sdpa",
    "fa2": "fa2",
    "fa3": "fa3",
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "flash_attention_4": "fa4",
    "kernels-community/flash-attn2": "fa2",
    "kernels-community/flash-attn3": "fa3",
    "kernels-community/vllm-flash-attn3": "fa3",
    "flex_attention": "flex",
    "flex": "flex",
    "flash": "fa2",
    "sdp": "sdpa",
}


def precision(draft: Draft, *, default: str) -> None:
    """``bf16``, ``fp16`` and ``pure_bf16``; ``default`` is what holds there without them."""
    written = {
        key: draft.take(key) for key in ("bf16", "fp16", "pure_bf16", "bfloat16", "float16") if key in draft.left
    }
    chosen = [key for key, value in written.items() if value is True or str(value).lower() in ("true", "full")]
    if {"bf16", "bfloat16", "pure_bf16"} & set(chosen) and {"fp16", "float16"} & set(chosen):
        raise draft.refuse("fp16", "bf16 is true as well; keep one of them")
    pure = bool({"pure_bf16", "bfloat16"} & set(chosen)) or str(written.get("bf16")).lower() == "full"
    if chosen:
        word = "fp16" if {"fp16", "float16"} & set(chosen) else "bf16"
    elif "auto" in written.values():
        word = "auto"
    else:
        word = "fp32" if written.get("bf16") is False else default
    for key in written:
        draft.translated(key, "precision.compute", word)
    if pure:
        draft.put("precision.trainable", "bf16")
    draft.default("precision.compute", word, "bf16")


def attention(draft: Draft, key: str, value: Any) -> None:
    """A backend under its name there. FlashAttention cannot compute in fp32; the plan then takes another."""
    backend = ATTENTION.get(str(value))
    if backend is None:
        draft.changed(
            key, "attention.backend", "auto", f"{value} is not known here: the plan takes the fastest that works"
        )
    elif backend in ("fa2", "fa3", "fa4") and draft.get("precision.compute") == "fp32":
        why = "FlashAttention does not compute in fp32, which this config asks for: the plan takes another"
        draft.changed(key, "attention.backend", "auto", why)
    else:
        draft.translated(key, "attention.backend", backend)


def quantization(draft: Draft, name_key: str) -> None:
    """Quantising a base on load: not supported yet. A checkpoint that is quantised already is loaded as it is."""
    chosen = next((key for key in SWITCHES if not is_off(draft.left.get(key))), None)
    name = str(draft.get("model.name_or_path") or "")
    if stored := _NOT_TRAINED.search(name):
        draft.refused(name_key, f"{stored.group()}: checkpoints quantised in this way cannot be trained on here")
    for key in QUANTIZED:
        if key not in draft.left:
            continue
        if is_off(draft.left[key]):
            draft.none(key, "is off")
        elif _STORED.search(name):
            draft.none(key, "the checkpoint is quantised already, and loaded as it is")
        elif key in SWITCHES:
            draft.refused(key, sixteen_bit(name))
        else:
            draft.none(key, f"belongs to {chosen}" if chosen else "the base is not quantised")


def sixteen_bit(name: str) -> str:
    """What it means that a base is not quantised on load, with the size of its weights where its name tells."""
    sizes = [float(size) for size in _BILLIONS.findall(name)]
    weights = f"{2 * max(sizes):,.0f} GB of weights in 16 bit" if sizes else "its weights in 16 bit"
    return (
        f"quantising a base on load is not supported yet: accepted, it takes {weights}, about four times as much as "
        "in 4 bit (halftune plan says whether that fits); or name a checkpoint that is quantised already (…-bnb-4bit)"
    )


def listed(value: Any) -> list[str]:
    """``"a, b"`` or a list, as a list."""
    items = value.split(",") if isinstance(value, str) else list(value)
    return [str(item).strip() for item in items if str(item).strip()]
