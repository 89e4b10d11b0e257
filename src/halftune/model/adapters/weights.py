"""Which weights of a model belong to an adapter, and their dtype."""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer

from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32, torch_dtype
from halftune.precision.report import is_adapter_weight


def cast_adapter(model: torch.nn.Module, plan: Plan) -> None:
    """Brings the adapter's weights to ``plan.precision.trainable``, parameter by parameter.

    Under autocast the adapters' matmuls are cast by autocast itself, so peft's own cast of their input to the adapter's
    dtype (a whole fp32 copy of every activation) is switched off. DoRA keeps it: its weight norms are computed in the
    input's dtype, and magnitudes are compared with them.
    """
    trainable = torch_dtype(plan.precision.trainable.value)
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            kept = stays_fp32(name, parameter, plan.precision.keep_fp32.value)
            parameter.data = parameter.data.to(torch.float32 if kept else trainable)
    if plan.precision.autocast.value:
        for module in model.modules():
            if isinstance(module, LoraLayer) and not module.lora_variant:
                module.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]
