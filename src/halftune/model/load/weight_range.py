"""Refuses weights beyond the fp16 range on load and save, instead of casting them to infinity."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from halftune.config.facts.safetensors_headers import stored_formats, weight_files
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32
from halftune.precision.truth_table import roundings

log = get_logger(__name__)
_NARROW = torch.float16  # bf16 has the range of fp32
_MOST = torch.finfo(_NARROW).max


class RangeCheck:
    """The range check of a checkpoint under a plan.

    Args:
        folder: folder of the checkpoint.
        plan: the check is active only if it stores or computes in fp16.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self._keep = folder, plan.precision.keep_fp32.value
        formats = (plan.precision.storage.value, plan.precision.compute.value)
        self.stored = stored_formats(folder)
        self._needed = "fp16" in formats and set(self.stored.values()) != {"fp16"}

    def model(self, model: nn.Module) -> None:
        """Check every loaded weight.

        Raises:
            ModelError: a weight exceeds the fp16 range; names it with its largest value.
        """
        for name, parameter in model.named_parameters() if self._needed else ():
            self.tensor(name, parameter)

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Check a weight, or rows of it, before or after its cast.

        Raises:
            ModelError: as ``model``.
        """
        checked = self._needed and tensor.is_floating_point() and not tensor.is_meta
        if not checked or stays_fp32(name, tensor, self._keep) or fits(tensor):
            return
        stored, value = self._in_files() or (name, largest(tensor))
        what = f"{stored} contains {value:,.6g}, which exceeds the fp16 range ({_MOST:,.0f})"
        remedy = "set precision: fp32, or precision: bf16 on a device that supports it"
        raise ModelError(what, where=str(self.folder), remedy=remedy, code="precision.fp16_overflow")

    def _in_files(self) -> tuple[str, float] | None:
        """The first stored tensor that exceeds the fp16 range, and its largest value."""
        for path in weight_files(self.folder):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    tensor = file.get_tensor(name) if name in self.stored else None
                    if tensor is not None and not fits(tensor):
                        return name, largest(tensor)
        return None

    def log_rounding(self, model: nn.Module, plan: Plan) -> None:
        """Log the tensors rounded on load, except those that the model's code keeps in fp32."""
        kept = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.float32}
        target = plan.precision.storage.value
        stored = {name: source for name, source in self.stored.items() if target == "fp32" or name not in kept}
        for one in roundings(stored, target, self._keep):
            count, some = len(one.names), ", ".join(one.alike[:3])
            more = " …" if len(one.alike) > 3 else ""
            said = "rounded %d of %d tensors from %s to %s on load: %s%s"
            log.info(said, count, len(self.stored), one.source, one.target, some, more)


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; NaN if the tensor contains NaN."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor.detach())
    return float(torch.maximum(-low, high))


def fits(tensor: torch.Tensor) -> bool:
    """Whether all values of a tensor are finite in fp16."""
    return bool(torch.tensor(largest(tensor), dtype=torch.float64).to(_NARROW).isfinite())


def cast_to_save(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy on the CPU in ``dtype``.

    Raises:
        ModelError: ``dtype`` is fp16 and a value exceeds its range.
    """
    cast = tensor.detach().to("cpu", dtype).contiguous()
    if dtype is _NARROW and tensor.dtype is not _NARROW and not fits(cast):
        what = f"{name} contains {largest(tensor):,.6g}, which exceeds the fp16 range ({_MOST:,.0f})"
        raise ModelError(
            what,
            remedy="train in bf16 or fp32; the newest checkpoint contains the fp32 weights",
            code="precision.fp16_overflow",
        )
    return cast
