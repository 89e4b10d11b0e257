"""What the stand-in pretends to be: a version of the package on a device of some capability; and what it was asked."""

from __future__ import annotations

import torch

version: tuple[int, int, int] = (2, 8, 3)
capability: tuple[int, int] = (8, 0)
calls: list[tuple[str, tuple[torch.dtype, ...]]] = []  # function, dtypes of its operands


def reset() -> None:
    """An A100 with 2.8.3 that nobody has called."""
    global version, capability
    version, capability = (2, 8, 3), (8, 0)
    calls.clear()
