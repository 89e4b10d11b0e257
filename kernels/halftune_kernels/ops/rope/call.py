"""A call of the rotary position embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """A checked call, as every implementation gets it; the fields are the first arguments of the registered operator.

    Attributes:
        q, k: ``[B, H, T, D]``, of any strides, each with its number of heads.
        cos, sin: ``[B, T, R]`` or ``[1, T, R]``.
        form: which channels form a pair.
        inverse: whether to rotate back.
    """

    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    form: str
    inverse: bool
