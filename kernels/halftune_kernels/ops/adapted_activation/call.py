"""A call of the gated activation between low-rank updates."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """A checked call, as every implementation gets it; the fields are the arguments of the registered operator.

    Attributes:
        gate, up: ``[T, M]``.
        low: ``[T, R_g + R_u]``.
        b_gate, b_up: ``[M, R_g]``, ``[M, R_u]``.
        a_down: ``[R_d, M]``.
        gate_scale, up_scale: of both updates.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
    """

    gate: torch.Tensor
    up: torch.Tensor
    low: torch.Tensor
    b_gate: torch.Tensor
    b_up: torch.Tensor
    a_down: torch.Tensor
    gate_scale: float
    up_scale: float
    activation: str
