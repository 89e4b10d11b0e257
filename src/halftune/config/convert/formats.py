"""Precision, attention, loaders of quantised weights: what the frameworks say about number formats, in our words."""

from __future__ import annotations

from typing import Any

from halftune.config.convert.draft import Draft

QUANTIZED = (
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
    "gptq",
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
    written = {key: draft.take(key) for key in ("bf16", "fp16", "pure_bf16") if key in draft.left}
    chosen = [key for key, value in written.items() if value is True or str(value).lower() in ("true", "full")]
    if "bf16" in chosen and "fp16" in chosen:
        raise draft.refuse("fp16", "bf16 is true as well; keep one of them")
    pure = "pure_bf16" in chosen or str(written.get("bf16")).lower() == "full"
    if chosen:
        word = "fp16" if "fp16" in chosen else "bf16"
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


def quantization(draft: Draft) -> None:
    """Quantised loading is not there today; saying so matters, it decides whether the model fits."""
    for key in QUANTIZED:
        if key in draft.left:
            value = draft.take(key)
            off = value in (None, False, "none")
            draft.none(key, "is off" if off else "not there today: the base is loaded in 16 bit and takes more memory")


def listed(value: Any) -> list[str]:
    """``"a, b"`` or a list, as a list."""
    items = value.split(",") if isinstance(value, str) else list(value)
    return [str(item).strip() for item in items if str(item).strip()]
