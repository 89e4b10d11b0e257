"""Which torch device a plan means, for the rooms that run a model without the trainer."""

from __future__ import annotations

import torch

from halftune.core.errors import ModelError
from halftune.plan import Plan

# kind of hardware → torch's device type (ROCm answers to CUDA's name)
TORCH_TYPES = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "mps": "mps", "cpu": "cpu"}


def device_of(plan: Plan) -> torch.device:
    """The device that ``plan.device`` names, e.g. ``cuda`` for an AMD GPU, too.

    Raises:
        ModelError: this torch build cannot reach it.
    """
    kind, _, index = plan.device.value.partition(":")
    device = torch.device(f"{TORCH_TYPES[kind]}:{index}" if index else TORCH_TYPES[kind])
    reachable = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available, "mps": torch.mps.is_available}
    if device.type != "cpu" and not reachable[device.type]():
        what = f"the plan runs on {plan.device.value}, which torch {torch.__version__} cannot reach here"
        raise ModelError(what, remedy="install a torch build for this device, or run where it is")
    return device
