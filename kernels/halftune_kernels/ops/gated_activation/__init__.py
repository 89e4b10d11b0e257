"""``act(gate) · up`` in one pass forward and one backward: SwiGLU and GEGLU."""

from __future__ import annotations

import torch

from halftune_kernels.ops.gated_activation.reference import ACTIVATIONS, reference

__all__ = ["ACTIVATIONS", "gated_activation"]


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str = "silu", *, backend: str | None = None
) -> torch.Tensor:
    """``act(gate) · up``, computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        gate, up: ``[..., M]``, of one shape and dtype; rows may be apart, as halves of a wider tensor.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        ``[..., M]``, contiguous.
    """
    from halftune_kernels.arguments import check_choice
    from halftune_kernels.ops.gated_activation import operators  # layers with LoRA on CPUs need neither

    check_choice("gated_activation", "activation", activation, ACTIVATIONS)
    if backend == "reference":
        return reference(gate, up, activation)
    width = gate.shape[-1]
    return operators.ACT(gate.reshape(-1, width), up.reshape(-1, width), activation, backend).view(gate.shape)
