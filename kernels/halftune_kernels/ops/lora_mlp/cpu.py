"""The gated feed-forward layer as one autograd function, in chunks of rows that stay in the cache.

Shapes: T rows, H hidden size, M inner size. Kept for the backward pass: ``x``, both inner products ``[T, M]`` and the
``[T, R]`` of the updates; the activation is computed again. Runs on every device; the chunks are for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from halftune_kernels.ops.lora_linear.cpu import Projection, rows_per_chunk
from halftune_kernels.ops.lora_linear.reference import AdaptedWeight

_silu_backward = torch.ops.aten.silu_backward.grad_input
_silu = torch.ops.aten.silu.out


def lora_mlp(x: torch.Tensor, gate: AdaptedWeight, up: AdaptedWeight, down: AdaptedWeight) -> torch.Tensor:
    """See `halftune_kernels.ops.lora_mlp.lora_mlp`; ``x`` is ``[T, H]``."""
    layers = (gate, up, down)
    keep = torch.is_grad_enabled()
    out = _LoraMlp.apply(x, layers, keep, *(factor for layer in layers for factor in (layer.a, layer.b)))
    assert isinstance(out, torch.Tensor)
    return out


class _LoraMlp(torch.autograd.Function):
    """The factors are arguments of their own, so that autograd sees them; ``layers`` holds them too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: tuple[AdaptedWeight, ...], keep: bool, *factors: Any) -> Any:
        gate, up, down = (Projection(layer, x.dtype) for layer in layers)
        rows, inner = x.shape[0], gate.weight.shape[0]
        step = rows_per_chunk(rows, x)
        out = x.new_empty(rows, down.weight.shape[0])
        lows = [projection.empty_low(rows) for projection in (gate, up, down)]
        kept = rows if keep else min(step, rows)
        gated, upped = x.new_empty(kept, inner), x.new_empty(kept, inner)
        scratch = x.new_empty(min(step, rows), inner)
        for start in range(0, rows, step):
            cut = slice(start, min(start + step, rows))
            size = cut.stop - start
            place = cut if keep else slice(0, size)
            low_gate, low_up, low_down = (None if low is None else low[cut] for low in lows)
            gate.forward(x[cut], gated[place], low_gate)
            up.forward(x[cut], upped[place], low_up)
            act = _silu(gated[place], out=scratch[:size]).mul_(upped[place])
            down.forward(act, out[cut], low_down)
        if keep:
            ctx.layers, ctx.step = [layer._replace(a=None, b=None) for layer in layers], step
            ctx.save_for_backward(x, gated, upped, *lows, *factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, gated, upped, *saved = ctx.saved_tensors
        lows, factors = saved[:3], saved[3:]
        layers = [layer._replace(a=factors[2 * i], b=factors[2 * i + 1]) for i, layer in enumerate(ctx.layers)]
        gate, up, down = projections = [Projection(layer, x.dtype) for layer in layers]
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        scratch = x.new_empty(3, min(ctx.step, x.shape[0]), gated.shape[1])
        for start in range(0, x.shape[0], ctx.step):
            cut = slice(start, start + ctx.step)
            low_gate, low_up, low_down = (None if low is None else low[cut] for low in lows)
            g, u, into = gated[cut], upped[cut], None if grad_x is None else grad_x[cut]
            silu, act, grad_act = scratch[:, : g.shape[0]]
            _silu(g, out=silu)
            torch.mul(silu, u, out=act)
            down.backward(grad[cut], act, low_down, grad_act)
            up.backward(silu.mul_(grad_act), x[cut], low_up, into)
            _silu_backward(grad_act.mul_(u), g, grad_input=act)
            gate.backward(act, x[cut], low_gate, into, accumulate=True)
        return grad_x, None, None, *(gradient for p in projections for gradient in p.gradients())
