"""The formula of causal attention within segments, in plain torch and the dtype of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """``softmax(scale · Q Kᵀ, causal) V`` for each segment alone; see `halftune_kernels.ops.causal_segments`."""
    groups = query.shape[0] // key.shape[0]
    outputs = []
    parts = (tensor.split(list(lengths), 1) for tensor in (query, key, value))
    for q, k, v in zip(*parts, strict=True):
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)
