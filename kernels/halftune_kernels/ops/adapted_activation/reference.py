"""The formula of a gated activation between low-rank updates, in plain torch and the dtype of its inputs."""

from __future__ import annotations

import torch

from halftune_kernels.ops.adapted_activation.call import Call
from halftune_kernels.ops.gated_activation.reference import act


def reference(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = act(gate + s_g L_g B_gᵀ) · (up + s_u L_u B_uᵀ)`` and ``y A_dᵀ``."""
    rank = call.b_gate.shape[1]
    z = call.gate + call.gate_scale * (call.low[:, :rank] @ call.b_gate.t())
    u = call.up + call.up_scale * (call.low[:, rank:] @ call.b_up.t())
    y = act(z, call.activation) * u
    return y, y @ call.a_down.t()
