"""``act(gate) · up`` between adapted linear layers, with the low-rank updates on both sides, in one pass each way.

``z = gate + s_g L_g B_gᵀ``, ``u = up + s_u L_u B_uᵀ``, ``y = act(z) · u`` and ``y A_dᵀ``: each ``[T, M]`` tensor is
read or written once, where separate products read and write it again for every update.
"""

from __future__ import annotations

import torch

from halftune_kernels.arguments import check_choice
from halftune_kernels.ops.adapted_activation import operators
from halftune_kernels.ops.adapted_activation.call import Call
from halftune_kernels.ops.adapted_activation.reference import reference
from halftune_kernels.ops.gated_activation.reference import ACTIVATIONS

__all__ = ["adapted_activation", "most_ranks", "reference"]


def most_ranks(dtype: torch.dtype) -> int:
    """The largest rank for which the sums of a tile's updates stay in registers."""
    return 64 if dtype.itemsize == 2 else 16


def adapted_activation(
    gate: torch.Tensor,
    up: torch.Tensor,
    low: torch.Tensor,
    b_gate: torch.Tensor,
    b_up: torch.Tensor,
    a_down: torch.Tensor,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    activation: str = "silu",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = act(z) · u`` and ``y A_dᵀ``, computed in fp32 (fp64 for fp64), each rounded once.

    Args:
        gate, up: ``[T, M]``, products of the frozen weights; rows may be apart.
        low: ``[T, R_g + R_u]``, the layer's input times A of the gate and of up, side by side.
        b_gate, b_up: ``[M, R_g]``, ``[M, R_u]``, of any float dtype, cast to that of ``gate``.
        a_down: ``[R_d, M]``, likewise.
        scales: of both updates.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        ``[T, M]`` and ``[T, R_d]``.
    """
    check_choice("adapted_activation", "activation", activation, ACTIVATIONS)
    call = Call(gate, up, low, b_gate, b_up, a_down, *scales, activation)
    return reference(call) if backend == "reference" else operators.ACT(*call, backend)
