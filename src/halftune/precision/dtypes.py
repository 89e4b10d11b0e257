"""Conversions between the plan's number formats and torch's dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from halftune.core.choice import Format
from halftune.core.errors import DtypeContractError
from halftune.precision import PrecisionPlan

_TORCH: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CONFIG_NAMES: dict[Format, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The formats' names in ``config.json``."""

_WRAPPING = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|modules_to_save|default)(?=\.|$)")

# Set on parameters that the model's code creates in fp32 whatever dtype is requested (an ``A_log`` with an explicit
# dtype, transformers' _keep_in_fp32_modules); treated like matches of the plan's patterns.
_KEPT = "halftune_kept_fp32"


def torch_dtype(name: Format) -> torch.dtype:
    """Convert ``"bf16"`` to ``torch.bfloat16``, and so on."""
    return _TORCH[name]


def format_of(dtype: torch.dtype) -> Format:
    """Convert ``torch.bfloat16`` to ``"bf16"``, and so on.

    Raises:
        DtypeContractError: another dtype, e.g. float64.
    """
    if dtype not in _NAMES:
        raise DtypeContractError(f"expected bf16, fp16 or fp32, got {dtype}", code="precision.unsupported_dtype")
    return _NAMES[dtype]


def autocast(plan: PrecisionPlan, device: torch.device) -> torch.autocast:
    """Return the plan's autocast context for training, evaluation and ``generate``.

    If the plan has autocast off, the context disables an outer autocast.
    """
    if not plan.autocast.value:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=torch_dtype(plan.compute.value))


def mark_kept(parameter: torch.Tensor) -> None:
    """Mark a parameter that the model's code keeps in fp32."""
    setattr(parameter, _KEPT, True)


def stays_fp32(name: str, parameter: torch.Tensor | None, patterns: Iterable[str]) -> bool:
    """Whether a parameter stays fp32: its name matches a pattern of the plan, or the model's code keeps it in fp32."""
    return hasattr(parameter, _KEPT) or matches(name, patterns)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a regular expression matches somewhere in a parameter's plain name."""
    plain = plain_name(name)
    return any(re.search(pattern, plain) for pattern in patterns)


def kept_names(model: torch.nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Return the plain names of all parameters and buffers that stay fp32."""
    chosen = tuple(patterns)
    tensors = (*model.named_parameters(), *model.named_buffers())
    return frozenset(plain_name(name) for name, tensor in tensors if stays_fp32(name, tensor, chosen))


def plain_name(name: str) -> str:
    """Return a parameter's name in the model, without peft's prefixes and wrappers."""
    return _WRAPPING.sub("", name)
