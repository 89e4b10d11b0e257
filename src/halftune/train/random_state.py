"""Random states of one process: Python, NumPy, torch on the CPU and on the process's device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """All states as JSON-able lists of numbers."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "cpu": torch.get_rng_state().tolist(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state().tolist()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what :func:`random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(torch.tensor(state[device.type], dtype=torch.uint8))
