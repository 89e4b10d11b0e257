"""The short causal convolution written out: every output a sum over its window, segment by segment."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from halftune_kernels.ops.causal_conv1d import Convolution


def causal_conv1d(call: Convolution) -> torch.Tensor:
    """See `halftune_kernels.ops.causal_conv1d.causal_conv1d_fn`; x is [B, T, D] here, fp32 inside (fp64 for fp64)."""
    x, weight, bias, silu, initial_states, segments = call
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    x_RD, weight_DW = x.to(wide).flatten(0, 1), weight.to(wide)
    outputs = []
    for n, (start, end) in enumerate(pairwise(segments.bounds)):
        before_WD = x_RD.new_zeros(width - 1, x.shape[2])
        if initial_states is not None:
            before_WD = initial_states[n].to(wide).T
        padded = torch.cat([before_WD, x_RD[start:end]])
        for t in range(end - start):
            outputs.append(torch.einsum("wd,dw->d", padded[t : t + width], weight_DW))
    y = torch.stack(outputs) if outputs else x_RD
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if silu else y).view(x.shape).to(x.dtype)
