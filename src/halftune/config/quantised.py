"""How a checkpoint says that its weights are quantised, and what is done with each way: kept, widened or refused."""

from __future__ import annotations

from typing import Any

from halftune.core.errors import ModelError

KEPT = {"bitsandbytes_4bit": 0.56, "bitsandbytes_8bit": 1.06}
"""Formats that are computed with as they are; bytes per weight with its share of scales."""
WIDENED = ("fp8", "mxfp4")
"""Formats that are written out in the storage dtype on load: their kernels have no backward pass, or not everywhere."""

_INSTEAD = "take a checkpoint in bf16, fp16 or fp32, or one whose config.json names its quantisation"


def method_of(settings: Any, where: str) -> str | None:
    """The format that config.json's ``quantization_config`` names; None where there is none.

    bitsandbytes' two are told apart. Checkpoints older than the name say ``load_in_8bit`` or ``load_in_4bit`` alone.

    Raises:
        ModelError: it is no table, or names no method: the weights mean nothing without.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        what = f"quantization_config is {settings!r}, not a table of settings"
        raise ModelError(what, where=where, remedy=_INSTEAD)
    method = settings.get("quant_method")
    old = bool(settings.get("load_in_8bit") or settings.get("load_in_4bit"))
    if method == "bitsandbytes" or (method is None and old):
        return f"bitsandbytes_{'8bit' if settings.get('load_in_8bit') else '4bit'}"
    if not isinstance(method, str) or not method:
        raise ModelError("quantization_config names no quant_method", where=where, remedy=_INSTEAD)
    return method


def refusal(method: str | None) -> str:
    """Why weights of a format cannot be trained upon, as a sentence; empty where they can."""
    if method is None or method in KEPT or method in WIDENED:
        return ""
    known = "bitsandbytes' are computed with as they are, fp8 and mxfp4 ones are widened on load"
    return f"the checkpoint is quantised by {method}, whose weights are not known here: {known}"
