"""Gated RMSNorm as registered operators; every implementation has `forward` and `backward`. Kept: only the inputs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from halftune_kernels.dispatch import implementation
from halftune_kernels.library import differentiable, operator
from halftune_kernels.ops.gated_rms_norm.cpu import GatedNorm


def _module(call: GatedNorm, backend: str | None) -> ModuleType:
    return implementation("gated_rms_norm", call.x, backend)


def norm(call: GatedNorm, backend: str | None) -> torch.Tensor:
    """The norm [M, D]."""
    return _module(call, backend).forward(call)


def norm_backward(
    grad: torch.Tensor, call: GatedNorm, wants_weight: bool, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of the weight and of the gate; empty if not wanted, or without a gate."""
    found = _module(call, backend).backward(grad, call, wants_weight)
    return tuple(grad.new_empty(0) if one is None else one for one in found)  # type: ignore[return-value]


def _fake_norm(call: GatedNorm, _: Any) -> torch.Tensor:
    return call.x.new_empty(call.x.shape, dtype=call.dtype)


def _fake_backward(grad: torch.Tensor, call: GatedNorm, wants_weight: bool, _: Any) -> tuple[torch.Tensor, ...]:
    weight = call.weight.new_empty(call.weight.shape) if wants_weight else grad.new_empty(0)
    gate = grad.new_empty(0) if call.gate is None else call.gate.new_empty(call.gate.shape)
    return call.x.new_empty(call.x.shape), weight, gate


NORM = operator("gated_rms_norm", norm, _fake_norm)
_BACKWARD = operator("gated_rms_norm_backward", norm_backward, _fake_backward)


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *options, backend = ctx.options
    _, wants_weight, wants_gate, *_ = ctx.needs_input_grad
    dx, dweight, dgate = _BACKWARD(grad, *ctx.saved_tensors, *options, wants_weight, backend)
    return dx, dweight if wants_weight else None, dgate if wants_gate else None, *(None for _ in ctx.options)


differentiable("gated_rms_norm", _gradients, _keep)
