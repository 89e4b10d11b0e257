"""What decides the bits of a process's results: random states, and how operators round."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_rounding(tf32: bool, deterministic: bool) -> None:
    """How operators round, before the first product on a GPU.

    Args:
        tf32: fp32 products may be computed in TF32.
        deterministic: those of torch and flash-attn round the same way each time; torch warns of one that cannot.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    if deterministic:
        # takes time, and is for finding bugs
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks


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
