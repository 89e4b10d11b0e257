"""Simple decay under the names and layouts of Mamba-2: what transformers' hybrid models call."""

from __future__ import annotations

from numbers import Real

import torch
import torch.nn.functional as F

from halftune_kernels.arguments import (
    ArgumentError,
    Shapes,
    check_floating,
    check_heads,
    check_same_device,
    check_same_dtype,
    without_autocast,
)
from halftune_kernels.ops.ssd.decay import simple_decay, simple_decay_step

_SCAN, _UPDATE = "mamba2_chunk_scan", "mamba2_selective_state_update"


@without_autocast
def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's scan: with ``d = clamp(softplus(dt + dt_bias))``,
    ``S_t = exp(d_t A) S_{t-1} + d_t x_t B_t^T`` and ``y_t = S_t C_t + D x_t``, times ``silu(z)``.

    Args:
        hidden_states: x, [B, T, H, P].
        dt: [B, T, H] raw projection, any float dtype; computed in fp32.
        A: [H], negative.
        B, C: [B, T, G, N]; H is a multiple of G.
        chunk_size: the model's; the result does not depend on it, so it is not used.
        D: [H] or [H, P]; no skip if None.
        z: [B, T, H, P] gate; none if None.
        dt_bias: [H] added to ``dt``.
        initial_states: [S, H, P, N]; S is B, or the samples of a packed row.
        dt_softplus: apply softplus to ``dt``.
        dt_limit: least and greatest step.
        return_final_states: also return the states after each segment, fp32.
        seq_idx, cu_seqlens, backend: see `halftune_kernels.ops.ssd.simple_decay`.

    Returns:
        y [B, T, H, P] in the dtype of ``hidden_states``; with ``return_final_states`` also [S, H, P, N].

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    del chunk_size
    _check_scan(hidden_states, dt, A, B, C, D, z, dt_bias, initial_states)
    _check_limit(dt_limit)
    d_BTH = _time_step(dt, dt_bias, dt_softplus, dt_limit)
    start = None if initial_states is None else initial_states.transpose(2, 3)
    # Not rounded before the skip and the gate: their gradients would see the rounding.
    wide = d_BTH.dtype if D is not None or z is not None else None
    where = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "backend": backend, "output_dtype": wide}
    decay_BTH, final = d_BTH * A.to(d_BTH.dtype), return_final_states
    y, state_SHNP = simple_decay(
        C, B, hidden_states, decay_BTH, w=d_BTH, scale=1.0, initial_state=start, output_final_state=final, **where
    )
    y = _skip_and_gate(y, hidden_states, D, z)
    return (y, state_SHNP.transpose(2, 3)) if state_SHNP is not None else y


@without_autocast
def mamba2_selective_state_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """One token of `mamba2_chunk_scan`, for generation; ``state`` [B, H, P, N] is updated in place.

    ``dt``, ``A``, ``D`` and ``dt_bias`` may carry a head's number repeated over its channels and states, as mamba_ssm
    and transformers pass it: [B, H, P], [H, P, N], [H, P], [H, P].

    Args:
        state: [B, H, P, N].
        hidden_states: x, [B, H, P].
        dt: [B, H] or [B, H, P].
        A: [H] or [H, P, N].
        B: [B, G, N].
        C: [B, G, N].
        D: [H] or [H, P].
        z: [B, H, P].
        dt_bias: [H] or [H, P].
        dt_softplus: apply softplus to ``dt``.

    Returns:
        y [B, H, P] in the dtype of ``hidden_states``.

    Raises:
        ArgumentError: an argument does not fit the others.
    """
    check_floating(_UPDATE, state=state, hidden_states=hidden_states, dt=dt, A=A, D=D, z=z, dt_bias=dt_bias)
    dt = dt[..., 0] if isinstance(dt, torch.Tensor) and dt.dim() == 3 and dt.shape[2] else dt
    A = A[:, 0, 0] if isinstance(A, torch.Tensor) and A.dim() == 3 and A[0].numel() else A
    dt_bias = dt_bias[:, 0] if dt_bias is not None and dt_bias.dim() == 2 and dt_bias.shape[1] else dt_bias
    shapes = Shapes(_UPDATE)
    for name, tensor, names in (
        ("state", state, "B H P N"), ("hidden_states", hidden_states, "B H P"), ("dt", dt, "B H"), ("A", A, "H"),
        ("B", B, "B G N"), ("C", C, "B G N"), ("z", z, "B H P"), ("dt_bias", dt_bias, "H"),
        ("D", D, "H P" if isinstance(D, torch.Tensor) and D.dim() == 2 else "H"),
    ):  # fmt: skip
        shapes.check(name, tensor, names, optional=name in ("z", "dt_bias", "D"))
    check_heads(_UPDATE, "hidden_states", shapes["H"], of="B", groups=shapes["G"])
    check_same_dtype(_UPDATE, hidden_states=hidden_states, B=B, C=C)
    check_same_device(
        _UPDATE, hidden_states=hidden_states, state=state, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias
    )
    step_BH = _time_step(dt, dt_bias, dt_softplus, (0.0, float("inf")))
    wide_BHNP = state.transpose(2, 3).to(step_BH.dtype, copy=True)
    y = simple_decay_step(C, B, hidden_states, step_BH * A.to(step_BH.dtype), wide_BHNP, w=step_BH, scale=1.0)
    state.copy_(wide_BHNP.transpose(2, 3))
    return _skip_and_gate(y, hidden_states, D, z)


def _check_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
) -> None:
    shapes = Shapes(_SCAN)
    for name, tensor, names in (
        ("hidden_states", hidden_states, "B T H P"), ("dt", dt, "B T H"), ("A", A, "H"), ("B", B, "B T G N"),
        ("C", C, "B T G N"), ("z", z, "B T H P"), ("dt_bias", dt_bias, "H"),
        ("D", D, "H P" if isinstance(D, torch.Tensor) and D.dim() == 2 else "H"),
    ):  # fmt: skip
        shapes.check(name, tensor, names, optional=name in ("z", "dt_bias", "D"))
    check_heads(_SCAN, "hidden_states", shapes["H"], of="B", groups=shapes["G"])
    check_same_dtype(_SCAN, hidden_states=hidden_states, B=B, C=C)
    check_floating(_SCAN, dt=dt, A=A, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    check_same_device(
        _SCAN, hidden_states=hidden_states, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias,
        initial_states=initial_states,
    )  # fmt: skip
    shapes.check("initial_states", initial_states, "S H P N", optional=True)


def _check_limit(limit: tuple[float, float]) -> None:
    """Numbers, in order; infinity is one of them."""
    pair = isinstance(limit, tuple | list) and len(limit) == 2
    if not pair or not all(isinstance(x, Real) for x in limit) or not limit[0] <= limit[1]:
        raise ArgumentError(_SCAN, "dt_limit", came=limit, expected="two numbers: the least and the greatest step")


def _time_step(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, softplus: bool, limit: tuple[float, float]
) -> torch.Tensor:
    """The step in fp32 (fp64 for fp64): half has no digits left for the bias of a small step."""
    step = dt.to(torch.promote_types(dt.dtype, torch.float32))
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if softplus:
        step = F.softplus(step)
    return step if limit == (0.0, float("inf")) and softplus else step.clamp(limit[0], limit[1])


def _skip_and_gate(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    if D is not None:
        y = torch.addcmul(y.to(wide), x.to(wide), (D if D.dim() == 2 else D[:, None]).to(wide))
    if z is not None:
        y = y.to(wide) * F.silu(z.to(wide))
    return y.to(x.dtype)
