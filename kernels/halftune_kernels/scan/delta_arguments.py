"""Argument checks of the delta-rule operators, and the L2 norm of their queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halftune_kernels.arguments import (
    ArgumentError,
    Segments,
    Shapes,
    check_floating,
    check_heads,
    check_same_device,
    check_same_dtype,
    check_state,
    find_segments,
)

EPSILON = 1e-6


def l2_normalise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / √(‖x‖² + ε) over the last dimension, and 1 / √(‖x‖² + ε) with that dimension kept."""
    inverse = torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)
    return vectors * inverse, inverse


def l2_normalise_backward(gradient: torch.Tensor, unit: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Gradient of x from that of x̂ = x · r: r (dx̂ - x̂ ⟨x̂, dx̂⟩)."""
    along = (unit * gradient).sum(-1, keepdim=True)
    return torch.addcmul(gradient, unit, along, value=-1.0).mul_(inverse)


class DeltaRule(NamedTuple):
    """A checked call of the gated delta rule or of Kimi delta attention, as every implementation gets it.

    Attributes:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: [B, T, HV], or [B, T, HV, K] for Kimi delta attention.
        beta: [B, T, HV].
        scale: of the output.
        initial_state: [N, HV, K, V]; None is zeros.
        segments: the samples of the row.
        normalise: whether q and k are divided by their norms.
        want_final: whether the final state is returned.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    initial_state: torch.Tensor | None
    segments: Segments
    normalise: bool
    want_final: bool


MOST_KEYS = 256  # kernels hold a tile of the state with all its keys on the chip; models use 64, 128 and 256
Gates = dict[str, tuple[torch.Tensor, str]]


def check_delta_arguments(
    operator: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    *,
    query: str = "q",
    grouped: bool = True,
) -> Segments:
    """Check q, k [B, T, H, K], v [B, T, HV, V], the gates (name: tensor, names of its dimensions) and the state.

    ``query`` is the name that ``q`` has for the operator; without ``grouped``, v has the heads of k.

    Returns:
        Where the samples begin and end.

    Raises:
        ArgumentError: names the argument, what came and what was expected.
    """
    shapes = Shapes(operator)
    heads = "HV" if grouped else "H"
    for name, tensor, names in ((query, q, "B T H K"), ("k", k, "B T H K"), ("v", v, f"B T {heads} V")):
        shapes.check(name, tensor, names)
    for name, (tensor, names) in gates.items():
        shapes.check(name, tensor, names)
    _check_sizes(operator, shapes, heads)
    check_same_dtype(operator, **{query: q, "k": k, "v": v})
    others = {**{name: gate for name, (gate, _) in gates.items()}, "initial_state": initial_state}
    check_floating(operator, **others)
    check_same_device(operator, **{query: q, "k": k, "v": v}, **others)
    segments = find_segments(operator, shapes["B"], shapes["T"], cu_seqlens, seq_idx)
    state = Shapes(operator, N=segments.count, K=shapes["K"], V=shapes["V"], **{heads: shapes[heads]})
    state.check("initial_state", initial_state, f"N {heads} K V", optional=True)
    return segments


def check_step_arguments(
    operator: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates, state: torch.Tensor
) -> None:
    """Check the arguments for one token: q, k [B, H, K], v [B, HV, V], state [B, HV, K, V] in fp32 or fp64."""
    shapes = Shapes(operator)
    for name, tensor, names in (("q", q, "B H K"), ("k", k, "B H K"), ("v", v, "B HV V"), ("state", state, "B HV K V")):
        shapes.check(name, tensor, names)
    for name, (tensor, names) in gates.items():
        shapes.check(name, tensor, names)
    _check_sizes(operator, shapes, "HV")
    check_same_dtype(operator, q=q, k=k, v=v)
    others = {name: gate for name, (gate, _) in gates.items()}
    check_floating(operator, **others)
    check_state(operator, state)
    check_same_device(operator, q=q, k=k, v=v, **others, state=state)


def _check_sizes(operator: str, shapes: Shapes, heads: str) -> None:
    check_heads(operator, "v", shapes[heads], of="k", groups=shapes["H"])
    check_head_size(operator, "k", shapes["K"], MOST_KEYS)
    check_head_size(operator, "v", shapes["V"], MOST_KEYS)


def check_head_size(operator: str, argument: str, size: int, most: int | None) -> None:
    """Check a size limit on every device, so that a model trained on one runs on others; None: no limit."""
    if size < 1 or (most is not None and size > most):
        expected = "a head size of 1 " + ("or more" if most is None else f"to {most}")
        raise ArgumentError(operator, argument, came=f"of head size {size}", expected=expected)
