"""Checkpoints of GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978): their integers as plain weights.

Weights of ``bits`` bits are packed into int32. A weight is ``(q - z) · s`` with a zero point and a scale for each group
of inputs. GPTQ packs along the inputs, and stores ``z - 1`` in its first format. AWQ packs along the outputs,
interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from halftune.config.facts.safetensors_headers import weight_files
from halftune.core.errors import ModelError

_PACKED = ".qweight"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each output in its int32


def unpacked(folder: Path, settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint, those of packed layers in ``dtype``.

    Args:
        folder: of the checkpoint.
        settings: ``quantization_config`` of its config.json.
        dtype: of the weights that were packed.

    Raises:
        ModelError: the settings name a form of packing that is not known.
    """
    check(settings, folder)
    found: dict[str, Tensor] = {}
    for name, value in _tensors(folder):
        found[name] = value
    for name in [one for one in found if one.endswith(_PACKED)]:
        layer = name.removesuffix(_PACKED)
        parts = {part: found.pop(f"{layer}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        made = _of_gptq(parts, settings) if settings["quant_method"] == "gptq" else _of_awq(parts, settings)
        found[f"{layer}.weight"] = made.to(dtype)
    return found


def check(settings: dict[str, Any], folder: Path) -> None:
    """Raise ModelError for a form of packing that is not known."""
    method, bits = settings["quant_method"], settings.get("bits", settings.get("w_bit", 4))
    form = str(settings.get("checkpoint_format") or "gptq") if method == "gptq" else settings.get("version", "gemm")
    if bits not in ((2, 4, 8) if method == "gptq" else (4,)) or str(form).lower() not in ("gptq", "gptq_v2", "gemm"):
        what = f"{method} with {bits} bits in the format {form} is not supported"
        remedy = "use a checkpoint of 4 bits in the format gptq, gptq_v2 or gemm, or the original one"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.quantization_unknown")


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                yield name, file.get_tensor(name)


def _of_gptq(parts: dict[str, Any], settings: dict[str, Any]) -> Tensor:
    """``[out, in]`` in fp32."""
    bits, scales = settings["bits"], parts["scales"].float()
    values = _integers(parts["qweight"].t(), bits).t()  # [in, out]
    zeros = _integers(parts["qzeros"], bits)  # [groups, out]
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    groups = parts["g_idx"]
    if groups is None:
        groups = torch.arange(len(values)) // (len(values) // len(scales))
    return ((values - zeros[groups.long()]) * scales[groups.long()]).t().contiguous()


def _of_awq(parts: dict[str, Any], settings: dict[str, Any]) -> Tensor:
    """``[out, in]`` in fp32."""
    values, zeros = (_integers(parts[name], 4, _AWQ_ORDER) for name in ("qweight", "qzeros"))
    scales = parts["scales"].float()
    groups = torch.arange(len(values)) // (len(values) // len(scales))
    return ((values - zeros[groups]) * scales[groups]).t().contiguous()


def _integers(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """The integers in each int32 of ``[N, K]``, along the second dimension: int32 ``[N, 32 / bits · K]``."""
    shifts = torch.tensor([bits * place for place in order or range(32 // bits)], dtype=torch.int32)
    return ((packed[:, :, None] >> shifts) & (2**bits - 1)).flatten(1)
