"""Parameter groups with and without weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Groups = list[dict[str, Any]]
"""torch's parameter groups: ``params`` and their options."""


def by_decay(parameters: Sequence[nn.Parameter], weight_decay: float) -> Groups:
    """Split parameters into two groups: matrices have weight decay; biases, norms and other vectors have none."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
