"""Between the plan's names of number formats and torch's dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from halftune.core.errors import DtypeContractError
from halftune.core.formats import Format
from halftune.precision.plan import PrecisionPlan

_TORCH: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CONFIG_NAMES: dict[Format, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What ``config.json`` calls each format."""

_WRAPPING = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|modules_to_save|default)(?=\.|$)")

# Set on a parameter that the model's own code creates in fp32 whatever dtype is asked for (an ``A_log`` made with an
# explicit dtype, transformers' _keep_in_fp32_modules): the author's choice, honoured like the plan's own patterns.
_KEPT = "halftune_kept_fp32"


def torch_dtype(name: Format) -> torch.dtype:
    """``"bf16"`` → ``torch.bfloat16``, and so on."""
    return _TORCH[name]


def format_of(dtype: torch.dtype) -> Format:
    """``torch.bfloat16`` → ``"bf16"``, and so on.

    Raises:
        DtypeContractError: no format of ours, e.g. float64.
    """
    if dtype not in _NAMES:
        raise DtypeContractError(f"{dtype} is none of bf16, fp16, fp32")
    return _NAMES[dtype]


def autocast(plan: PrecisionPlan, device: torch.device) -> torch.autocast:
    """The plan's autocast as a context manager; one that does nothing where the plan has autocast off.

    It is entered around forward, evaluation and ``generate`` alike. Off is explicit too: an outer autocast does not
    reach in.
    """
    if not plan.autocast.value:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=torch_dtype(plan.compute.value))


def mark_kept(parameter: torch.Tensor) -> None:
    """Notes that the model's own code keeps this parameter in fp32."""
    setattr(parameter, _KEPT, True)


def stays_fp32(name: str, parameter: torch.Tensor | None, patterns: Iterable[str]) -> bool:
    """Whether a parameter stays fp32: by the plan's patterns (searched in its name), or by the model's own code."""
    plain = plain_name(name)
    return hasattr(parameter, _KEPT) or any(re.search(pattern, plain) for pattern in patterns)


def kept_names(model: torch.nn.Module, patterns: Iterable[str]) -> frozenset[str]:
    """Plain names of all parameters and buffers that stay fp32."""
    chosen = tuple(patterns)
    tensors = (*model.named_parameters(), *model.named_buffers())
    return frozenset(plain_name(name) for name, tensor in tensors if stays_fp32(name, tensor, chosen))


def plain_name(name: str) -> str:
    """A parameter's name as the model itself has it, without what peft wraps around it."""
    return _WRAPPING.sub("", name)
