"""Short causal depthwise convolution with activation, as linear-attention layers use it before their scan."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from halftune_kernels.arguments import (
    ArgumentError,
    Segments,
    Shapes,
    check_choice,
    check_floating,
    check_same_device,
    find_segments,
    without_autocast,
)
from halftune_kernels.dispatch import module

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
_ACTIVATIONS = (None, "silu", "swish")


class Convolution(NamedTuple):
    """A checked call of `causal_conv1d_fn`, as every implementation gets it; x is [B, T, D] here."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    initial_states: torch.Tensor | None
    segments: Segments


@without_autocast
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``y[t] = act(bias + sum_i weight[i] x[t - W + 1 + i])`` per channel, within each sample.

    Args:
        x: [B, D, T]; a transposed [B, T, D] is read without a copy.
        weight: [D, W], in any float dtype.
        bias: [D].
        activation: ``silu``, ``swish`` (the same) or None.
        initial_states: [N, D, W-1], what came before each segment; zeros if None.
        return_final_states: also return the last W-1 inputs of each segment.
        seq_idx: [B, T] sample numbers.
        cu_seqlens: [N + 1] boundaries of the samples in a packed row (B = 1).
        backend: see `halftune_kernels.dispatch.choose`.

    Returns:
        y [B, D, T] in the dtype of ``x``, a transposed view; with ``return_final_states`` also [N, D, W-1].

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    shapes = Shapes("causal_conv1d_fn")
    for name, tensor, names in (("x", x, "B D T"), ("weight", weight, "D W"), ("bias", bias, "D")):
        shapes.check(name, tensor, names, optional=name == "bias")
    check_choice("causal_conv1d_fn", "activation", activation, _ACTIVATIONS)
    check_floating("causal_conv1d_fn", x=x, weight=weight, bias=bias, initial_states=initial_states)
    _check_taps("causal_conv1d_fn", weight)
    device = check_same_device("causal_conv1d_fn", x=x, weight=weight, bias=bias, initial_states=initial_states)
    segments = find_segments("causal_conv1d_fn", shapes["B"], shapes["T"], cu_seqlens, seq_idx)
    before = Shapes("causal_conv1d_fn", N=segments.count, D=shapes["D"])
    before.check("initial_states", initial_states, "N D W-1", optional=True)
    if initial_states is not None and before["W-1"] != shapes["W"] - 1:
        came = f"of {before['W-1']} columns"
        raise ArgumentError("causal_conv1d_fn", "initial_states", came=came, expected=f"W - 1 = {shapes['W'] - 1}")
    run = module("causal_conv1d", device, x.dtype, backend).causal_conv1d
    x_BTD = x.transpose(1, 2)
    call = Convolution(x_BTD, weight, bias, activation is not None, initial_states, segments)
    y = run(call).transpose(1, 2)
    return (y, _final_states(x_BTD, initial_states, shapes["W"], segments)) if return_final_states else y


@without_autocast
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The next tokens of `causal_conv1d_fn`, for generation; ``conv_state`` is updated in place.

    Args:
        x: [B, D] or [B, D, T], usually one token.
        conv_state: [B, D, S], the last S >= W - 1 inputs.
        weight: [D, W].
        bias: [D].
        activation: ``silu``, ``swish`` or None.

    Returns:
        y in the shape and dtype of ``x``.

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    x_BDT = x[..., None] if isinstance(x, torch.Tensor) and x.dim() == 2 else x
    shapes = Shapes("causal_conv1d_update")
    for name, tensor, names in (
        ("x", x_BDT, "B D T"), ("conv_state", conv_state, "B D S"), ("weight", weight, "D W"), ("bias", bias, "D"),
    ):  # fmt: skip
        shapes.check(name, tensor, names, optional=name == "bias")
    check_choice("causal_conv1d_update", "activation", activation, _ACTIVATIONS)
    check_floating("causal_conv1d_update", x=x, conv_state=conv_state, weight=weight, bias=bias)
    check_same_device("causal_conv1d_update", x=x, conv_state=conv_state, weight=weight, bias=bias)
    _check_taps("causal_conv1d_update", weight)
    held, width = shapes["S"], shapes["W"]
    if held < width - 1:
        came = f"of {held} columns"
        raise ArgumentError("causal_conv1d_update", "conv_state", came=came, expected=f"at least W - 1 = {width - 1}")
    wide = torch.promote_types(x.dtype, torch.float32)
    seen = torch.cat([conv_state.to(wide), x_BDT.to(wide)], dim=-1)
    conv_state.copy_(seen[..., -held:])
    windows_BDTW = seen[..., held - width + 1 :].unfold(-1, width, 1)
    y = (windows_BDTW * weight.to(wide)[:, None]).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)[:, None]
    y = (F.silu(y) if activation else y).to(x.dtype)
    return y.view(x.shape)


def _final_states(
    x_BTD: torch.Tensor, initial_states: torch.Tensor | None, width: int, segments: Segments
) -> torch.Tensor:
    """[N, D, W-1]: the last inputs of each segment, what came before it where it is shorter."""
    rows, last = x_BTD.flatten(0, 1), []
    for n in range(segments.count):
        start, end = segments.bounds[n], segments.bounds[n + 1]
        before = rows.new_zeros(width - 1, rows.shape[1])
        if initial_states is not None:
            before = initial_states[n].to(rows.dtype).T
        joined = torch.cat([before, rows[max(start, end - width + 1) : end]])
        last.append(joined[len(joined) - width + 1 :].T)
    return torch.stack(last)


def _check_taps(operator: str, weight: torch.Tensor) -> None:
    if not weight.shape[1]:
        raise ArgumentError(operator, "weight", came="of no taps", expected="[D, W] with W of at least 1")
