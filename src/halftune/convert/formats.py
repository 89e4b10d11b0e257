"""Precision, attention, loaders of quantised weights: what the frameworks say about number formats, in our words."""

from __future__ import annotations

import re
from typing import Any

from halftune.convert.draft import Draft, is_off

SWITCHES = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_config")
_STORED = re.compile(r"bnb-?4bit|bnb-?8bit|-4bit$", re.IGNORECASE)
_WIDENED = re.compile(r"(?i:\b(awq|gptq)\b)")  # dequantised on load, like fp8 and mxfp4
_NOT_TRAINED = re.compile(r"(?i:\b(aqlm|hqq|eetq|exl2|gguf|int8|nvfp4|fp4)\b)")
SINGLE = ("double_quantization", "use_bnb_nested_quant", "bnb_4bit_use_double_quant")
SETTINGS = (
    *SINGLE,
    "quantization_method",
    "quantization_type",
    "bnb_4bit_quant_type",
    "bnb_4bit_quant_storage",
    "bnb_config_kwargs",
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
    "xformers": "auto",
}


# Keys of half formats, and values with which trained weights are in bf16, too.
HALF = {"bf16": "bf16", "fp16": "fp16", "pure_bf16": "bf16", "bfloat16": "bf16", "float16": "fp16"}
PURE = {("bf16", "full"), ("pure_bf16", "true"), ("bfloat16", "true")}


def precision(draft: Draft, *, default: str) -> None:
    """``bf16``, ``fp16`` and ``pure_bf16``; ``default`` is what holds there without them."""
    written = {key: str(draft.take(key)).lower() for key in HALF if key in draft.left}
    on = {HALF[key] for key, value in written.items() if value in ("true", "full")}
    if len(on) > 1:
        raise draft.refuse("fp16", "bf16 is true as well; keep one of them")
    words = {"auto": "auto", "false": "fp32"} | ({"none": "fp32"} if draft.framework == "axolotl" else {})
    word = on.pop() if on else words.get(written.get("bf16", ""), default)
    for key in written:
        draft.translated(key, "precision.compute", word)
    if PURE & written.items():
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
    """Quantising a base on load, by bitsandbytes. A checkpoint that is quantised already is loaded as it is."""
    on = [key for key in SWITCHES if not is_off(draft.left.get(key))]
    name = str(draft.get("model.name_or_path"))
    if stored := _NOT_TRAINED.search(name):
        draft.refused(name_key, f"{stored.group()}: checkpoints quantised in this way cannot be trained on here")
    made = _on_load(draft, on[0]) if on else None
    if _STORED.search(name) or _WIDENED.search(name):
        draft.drop(dict.fromkeys((*SWITCHES, *SETTINGS), "the checkpoint is quantised already, and loaded as it is"))
    draft.drop(dict.fromkeys(SETTINGS, f"belongs to {on[0]}" if on else "the base is not quantised"))
    for key in on if made else ():
        draft.move(key, "model.quantization", lambda _: made)
    why = "not supported: a base is quantised on load by bitsandbytes, to nf4 or int8"
    draft.drop(dict.fromkeys(SWITCHES, why), "refused")


def _on_load(draft: Draft, key: str) -> str | None:
    """What ``key`` asks for, in our words; None where it cannot be had."""
    by = str(draft.left.get("quantization_method") or "bnb")
    more = draft.left.get("bnb_config_kwargs")
    given = {**draft.left, **(more if isinstance(more, dict) else {})}
    kind = str(given.get("quantization_type") or given.get("bnb_4bit_quant_type") or "nf4")
    bits = {"load_in_4bit": 4, "load_in_8bit": 8}.get(key, draft.left[key])
    if by not in ("bnb", "bitsandbytes"):
        return None
    if bits == 4 and kind == "nf4":
        return "nf4_single" if any(given.get(key) is False for key in SINGLE) else "nf4"
    return "int8" if bits == 8 else None


def listed(value: Any) -> list[str]:
    """``"a, b"`` or a list, as a list."""
    items = value.split(",") if isinstance(value, str) else list(value)
    return [str(item).strip() for item in items if str(item).strip()]
