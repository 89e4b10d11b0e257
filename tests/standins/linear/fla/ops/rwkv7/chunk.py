"""``chunk_rwkv7`` token by token, with the package's signature and its wish for one half format."""

from __future__ import annotations

import torch

calls: list[tuple[torch.dtype, ...]] = []  # dtypes of r, k, v, a, b


def chunk_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All ``[B, T, H, D]``; ``w`` is the log decay. S ← S·diag(exp w) + (S·a)ᵀ·b + vᵀ·k; out = S·r."""
    calls.append(tuple(x.dtype for x in (r, k, v, a, b)))
    if len(set(calls[-1])) > 1 or r.dtype not in (torch.float16, torch.bfloat16):
        raise AssertionError(f"one half format of r, k, v, a, b, got {calls[-1]}")
    with torch.autocast(r.device.type, enabled=False):
        state = r.new_zeros(r.shape[0], r.shape[2], r.shape[3], r.shape[3], dtype=torch.float32)
        out = []
        for t in range(r.shape[1]):
            rt, wt, kt, vt, at, bt = (x[:, t].float() for x in (r, w, k, v, a, b))
            read = torch.einsum("bhvk,bhk->bhv", state, at)
            state = state * wt.exp()[:, :, None] + read[..., None] * bt[:, :, None] + vt[..., None] * kt[:, :, None]
            out.append(torch.einsum("bhvk,bhk->bhv", state, rt) * scale)
        return torch.stack(out, 1).to(r.dtype), state if output_final_state else None
