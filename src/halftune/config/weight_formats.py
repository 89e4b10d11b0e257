"""The formats of frozen weights, one row each: stored in checkpoints, or quantised on load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halftune.core.errors import ModelError

_INSTEAD = "use a checkpoint in bf16, fp16 or fp32, or one whose config.json names its quantisation"
OnLoad = Literal["none", "nf4", "nf4_single", "int8"]
"""The type of ``model.quantization``: the rows of :data:`WEIGHT_FORMATS` for quantisation on load."""


@dataclass(frozen=True)
class WeightFormat:
    """A format of frozen linear layers; embeddings, output layer and norms keep the storage dtype.

    Attributes:
        bytes_per_param: of linear layers, scales included; None: as the storage dtype.
        on_load: arguments of ``BitsAndBytesConfig`` for quantising a plain checkpoint on load.
        trainable: whether full fine-tuning can train these weights.
        shardable: whether fsdp2 can shard them.
        package: required distribution.
        devices: kinds of devices that support quantisation on load.
    """

    bytes_per_param: float | None = None
    on_load: Mapping[str, Any] = field(default_factory=dict)
    trainable: bool = False
    shardable: bool = False
    package: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda", "rocm", "xpu", "mps")


_BITSANDBYTES: dict[str, Any] = {"package": "bitsandbytes", "devices": ("cpu", "cuda", "rocm", "xpu")}
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "none": WeightFormat(trainable=True, shardable=True),
    "nf4": WeightFormat(0.516, _NF4, **_BITSANDBYTES),
    "nf4_single": WeightFormat(0.5625, {**_NF4, "bnb_4bit_use_double_quant": False}, **_BITSANDBYTES),
    "int8": WeightFormat(1.01, {"load_in_8bit": True}, **_BITSANDBYTES),
    "bitsandbytes_4bit": WeightFormat(0.56, **_BITSANDBYTES),
    "bitsandbytes_8bit": WeightFormat(1.01, **_BITSANDBYTES),
    # dequantised to the storage dtype on load, since not all their kernels have a backward pass
    "fp8": WeightFormat(),
    "mxfp4": WeightFormat(),
    "gptq": WeightFormat(),
    "awq": WeightFormat(),
}
STORED = tuple(name for name, row in WEIGHT_FORMATS.items() if name != "none" and not row.on_load)
"""Formats that a checkpoint may have."""


def method_of(settings: Any, where: str) -> str | None:
    """Return the format in config.json's ``quantization_config``; None if unquantised.

    bitsandbytes has two formats. Old checkpoints have ``load_in_8bit`` or ``load_in_4bit`` without a method name.

    Raises:
        ModelError: it is not a mapping, or has no method.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        what = f"quantization_config: expected a mapping, got {settings!r}"
        raise ModelError(what, where=where, remedy=_INSTEAD, code="model.quantization_unknown")
    method = settings.get("quant_method")
    old = bool(settings.get("load_in_8bit") or settings.get("load_in_4bit"))
    if method == "bitsandbytes" or (method is None and old):
        return f"bitsandbytes_{'8bit' if settings.get('load_in_8bit') else '4bit'}"
    if not isinstance(method, str) or not method:
        what = "quantization_config has no quant_method"
        raise ModelError(what, where=where, remedy=_INSTEAD, code="model.quantization_unknown")
    return method


def refusal(method: str | None) -> str:
    """Return the reason why training does not support a format; empty if it does."""
    if method is None or method in STORED:
        return ""
    known = "bitsandbytes weights stay quantised; fp8, mxfp4, gptq and awq weights are dequantised on load"
    return f"the checkpoint's quantisation method {method} is not supported: {known}"


def format_of(method: str | None) -> WeightFormat:
    """Return a format's row; None means plain weights; a row without capabilities for unsupported formats."""
    return WEIGHT_FORMATS.get(method or "none", WeightFormat())
