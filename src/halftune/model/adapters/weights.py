"""Dtypes of adapter weights."""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper

from halftune.plan import Plan
from halftune.precision.dtypes import kept_names, mark_kept, plain_name, torch_dtype
from halftune.precision.report import is_adapter_weight


def _cast_embedding_output(model: torch.nn.Module, plan: Plan) -> None:
    """Cast the output of a trained fp32 embedding (``modules_to_save``) to the base model's dtype.

    Otherwise the residual stream of a half-precision model would be fp32, and layers that do not cast their input
    (LayerNorm on a CPU) would fail.
    """
    storage = torch_dtype(plan.precision.storage.value)

    def cast(_module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output.to(storage)

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                if isinstance(copy, torch.nn.Embedding):
                    copy.register_forward_hook(cast)


def cast_adapter(model: torch.nn.Module, plan: Plan) -> None:
    """Cast the adapter's weights to ``plan.precision.trainable``, parameter by parameter.

    Under autocast, peft's cast of inputs to the adapter's dtype (an fp32 copy of every activation) is disabled, since
    autocast casts the matmuls. DoRA keeps it: it computes weight norms in the input's dtype and divides by them.
    """
    trainable = torch_dtype(plan.precision.trainable.value)
    stay = kept_names(model, plan.precision.keep_fp32.value)
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            kept = plain_name(name) in stay
            parameter.data = parameter.data.to(torch.float32 if kept else trainable)
            if kept:
                mark_kept(parameter)  # peft's copy of a marked weight is not marked
    _cast_embedding_output(model, plan)
    if plan.precision.autocast.value:
        for module in model.modules():
            if isinstance(module, LoraLayer) and not module.lora_variant:
                module.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]
