"""The torch device of a plan, for inference and export."""

from __future__ import annotations

import torch

from halftune.core.errors import ModelError
from halftune.plan import Plan

# kind of hardware → torch device type (ROCm uses "cuda")
TORCH_TYPES = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "mps": "mps", "cpu": "cpu"}


def device_of(plan: Plan) -> torch.device:
    """Return the torch device of ``plan.device``.

    Raises:
        ModelError: this torch build does not support the device.
    """
    kind, _, index = plan.device.value.partition(":")
    device = torch.device(f"{TORCH_TYPES[kind]}:{index}" if index else TORCH_TYPES[kind])
    reachable = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available, "mps": torch.mps.is_available}
    if device.type != "cpu" and not reachable[device.type]():
        what = f"device {plan.device.value} is not available in torch {torch.__version__}"
        raise ModelError(what, remedy="install a torch build for this device", code="hardware.device_unavailable")
    return device
