"""Which weights of a model belong to an adapter, and their dtype."""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper

from halftune.plan import Plan
from halftune.precision.dtypes import kept_names, mark_kept, plain_name, torch_dtype
from halftune.precision.report import is_adapter_weight


def _hand_over_in_storage_dtype(model: torch.nn.Module, plan: Plan) -> None:
    """A saved embedding (``modules_to_save``) is trained in fp32; what it returns goes on in the base's dtype.

    Otherwise the whole residual stream would be fp32 in an otherwise half model, and layers that do not cast for
    themselves (LayerNorm on a CPU) refuse it beside their half weights.
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
    """Brings the adapter's weights to ``plan.precision.trainable``, parameter by parameter.

    Under autocast the adapters' matmuls are cast by autocast itself, so peft's own cast of their input to the adapter's
    dtype (a whole fp32 copy of every activation) is switched off. DoRA keeps it: its weight norms are computed in the
    input's dtype, and magnitudes are compared with them.
    """
    trainable = torch_dtype(plan.precision.trainable.value)
    stay = kept_names(model, plan.precision.keep_fp32.value)
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            kept = plain_name(name) in stay
            parameter.data = parameter.data.to(torch.float32 if kept else trainable)
            if kept:
                mark_kept(parameter)  # a copy that peft made of a marked weight has no mark yet
    _hand_over_in_storage_dtype(model, plan)
    if plan.precision.autocast.value:
        for module in model.modules():
            if isinstance(module, LoraLayer) and not module.lora_variant:
                module.cast_input_dtype_enabled = False  # pyright: ignore[reportArgumentType]
