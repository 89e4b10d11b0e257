"""RMSNorm with a gate, as linear-attention layers use it after their scan.

On GPUs and in graphs a registered operator, imported on the first call; elsewhere an autograd function.
"""

from __future__ import annotations

import torch

from halftune_kernels.arguments import (
    ArgumentError,
    Shapes,
    check_choice,
    check_floating,
    check_number,
    check_same_device,
    without_autocast,
)
from halftune_kernels.library import opaque
from halftune_kernels.ops.gated_rms_norm import cpu
from halftune_kernels.ops.gated_rms_norm.cpu import GatedNorm

__all__ = ["gated_rms_norm"]
_NAME = "gated_rms_norm"


@without_autocast
def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``norm(x) * weight * act(gate)``, or ``norm(x * act(gate)) * weight``.

    Args:
        x: [..., D].
        weight: [D], in any float dtype.
        gate: [..., D]; none if None.
        eps: added to the mean square.
        activation: ``silu``, ``swish`` (the same) or ``sigmoid``.
        norm_before_gate: first form (Qwen3-Next, Kimi) or second (Mamba-2).
        group_size: the norm is over runs of this many channels; over all D if None.
        dtype: of the result; that of ``x`` by default.
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        [..., D], contiguous. Everything inside is fp32 (fp64 for fp64), and rounded once.

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    check_choice(_NAME, "activation", activation, ("silu", "swish", "sigmoid"))
    if not isinstance(x, torch.Tensor) or not x.dim():
        raise ArgumentError(_NAME, "x", came=repr(x), expected="a tensor of shape [..., D]")
    Shapes(_NAME, D=x.shape[-1]).check("weight", weight, "D")
    check_floating(_NAME, x=x, weight=weight, gate=gate)
    if gate is not None and gate.shape != x.shape:
        came = f"of shape {list(gate.shape)}"
        raise ArgumentError(_NAME, "gate", came=came, expected=f"{list(x.shape)}, as x has")
    size = x.shape[-1] if group_size is None else group_size
    if not isinstance(size, int) or size < 1 or x.shape[-1] % size:
        raise ArgumentError(_NAME, "group_size", came=size, expected=f"a divisor of D = {x.shape[-1]}")
    check_same_device(_NAME, x=x, weight=weight, gate=gate)
    eps = check_number(_NAME, "eps", eps, least=0.0, expected="a number from 0 on")
    flat = None if gate is None else gate.reshape(-1, x.shape[-1])
    rows, sigmoid = x.reshape(-1, x.shape[-1]), activation == "sigmoid"
    call = GatedNorm(rows, weight, flat, eps, sigmoid, norm_before_gate, size, dtype or x.dtype)
    if backend == "reference":
        from halftune_kernels.ops.gated_rms_norm import reference

        y = reference.gated_rms_norm(call)
    elif backend is not None or opaque(x):
        from halftune_kernels.ops.gated_rms_norm import operators

        y = operators.NORM(*call, backend)
    else:
        y = cpu.gated_rms_norm(call)
    return y.view(x.shape)
