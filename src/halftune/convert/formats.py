"""Precision, attention, loaders of quantised weights: what the frameworks say about number formats, in our words."""

from __future__ import annotations

import re

from halftune.convert.draft import Draft, is_off, table

SWITCHES = "load_in_4bit load_in_8bit quantization_bit quant_config"
SINGLE = "double_quantization use_bnb_nested_quant bnb_4bit_use_double_quant"
SETTINGS = f"""{SINGLE} quantization_method quantization_type bnb_4bit_quant_type bnb_4bit_quant_storage
    quantization_device_map"""
_AS_IT_IS = re.compile(r"(?i:bnb-?[48]bit|-4bit$|\b(awq|gptq)\b)")  # or dequantised on load, like fp8 and mxfp4
_NOT_TRAINED = re.compile(r"(?i:\b(aqlm|hqq|eetq|exl2|gguf|int8|nvfp4|fp4)\b)")
ATTENTION = {theirs: ours for ours, names in table("trainer", "attention").items() for theirs in names}
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


def attention(draft: Draft, *keys: str) -> None:
    """A backend under its name there. FlashAttention cannot compute in fp32; the plan then takes another."""
    for key in filter(draft.has, keys):
        value = str(draft.take(key))
        backend, why = ATTENTION.get(value, "auto"), ""
        if value not in ATTENTION:
            why = f"{value} is not known here: the plan takes the fastest that works"
        elif backend.startswith("fa") and draft.get("precision.compute") == "fp32":
            backend = "auto"
            why = "FlashAttention does not compute in fp32, which this config asks for: the plan takes another"
        draft.translated(key, "attention.backend", backend, changed=why)


def quantization(draft: Draft, name_key: str) -> None:
    """Quantising a base on load, by bitsandbytes. A checkpoint that is quantised already is loaded as it is."""
    on = [key for key in SWITCHES.split() if not is_off(draft.left.get(key))]
    name = str(draft.get("model.name_or_path"))
    if stored := _NOT_TRAINED.search(name):
        draft.refused(name_key, f"{stored.group()}: checkpoints quantised in this way cannot be trained on here")
    made = _on_load(draft, on[0]) if on else None
    if _AS_IT_IS.search(name):
        draft.drop(f"{SWITCHES} {SETTINGS}", "the checkpoint is quantised already, and loaded as it is")
    draft.drop(SETTINGS, f"belongs to {on[0]}" if on else "the base is not quantised")
    for key in on if made else ():
        draft.move(key, "model.quantization", lambda _: made)
    draft.drop(SWITCHES, "not supported: a base is quantised on load by bitsandbytes, to nf4 or int8", "refused")


def _on_load(draft: Draft, key: str) -> str | None:
    """What ``key`` asks for, in our words; None where it cannot be had."""
    more = draft.left.get("bnb_config_kwargs")
    given = {**draft.left, **(more if isinstance(more, dict) else {})}
    kind = str(given.get("quantization_type") or given.get("bnb_4bit_quant_type") or "nf4")
    bits = {"load_in_4bit": 4, "load_in_8bit": 8}.get(key, draft.left[key])
    if str(draft.left.get("quantization_method") or "bnb") not in ("bnb", "bitsandbytes"):
        return None
    if bits == 4 and kind == "nf4":
        return "nf4_single" if False in map(given.get, SINGLE.split()) else "nf4"
    return "int8" if bits == 8 else None
