"""Loads quantised checkpoints: kept quantised, or dequantised on load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from halftune.config.weight_formats import STORED, format_of, method_of
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.core.optional import need
from halftune.model.files.architectures import no_progress_bars, read_config
from halftune.model.load.own_dtypes import kept_by_class
from halftune.model.load.packed_int4 import unpacked
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype


def quantisation(folder: Path) -> str | None:
    """The quantisation method in a checkpoint's config.json; None if unquantised."""
    file = folder / "config.json"
    return method_of(json.loads(file.read_text(encoding="utf-8")).get("quantization_config"), str(file))


def load_arguments(folder: Path, plan: Plan, *, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a quantised checkpoint, or for quantisation on load.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
        ModelError: an unsupported quantisation method.
    """
    method = quantisation(folder)
    if plan.weights.origin == "on_load":
        row = format_of(plan.weights.format.value)
        need(row.package, why=f"model.quantization: {plan.weights.format.value}")
        settings: Any = dict(row.on_load)
        if settings.get("load_in_4bit"):
            settings["bnb_4bit_compute_dtype"] = torch_dtype(plan.precision.compute.value)
        return {"quantization_config": BitsAndBytesConfig(**settings)}
    if method is None:
        return {}
    if method not in STORED:
        what = f"unsupported quantisation method {method}"
        raise ModelError(what, where=str(folder), code="model.quantization_unknown")
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if method in ("gptq", "awq"):
        settings = vars(config).pop("quantization_config")
        return {"config": config, "state_dict": unpacked(folder, settings, torch_dtype(plan.precision.storage.value))}
    if package := format_of(method).package:
        need(package, why=f"a checkpoint in {method}")
    else:  # transformers would dequantise only if its kernels do not run; quantised weights cannot be trained through
        config.quantization_config = {**vars(config)["quantization_config"], "dequantize": True}
    return {"config": config}


def store_as_planned(model: PreTrainedModel, plan: Plan) -> None:
    """Cast the weights of a quantised checkpoint that are not quantised in memory to the storage dtype.

    transformers keeps their stored dtype, whatever dtype was requested. Inside ``in_own_dtypes``: its names become
    fp32.
    """
    storage = torch_dtype(plan.precision.storage.value)
    own = kept_by_class(model, {plan.precision.storage.value})
    for name, parameter in model.named_parameters():
        packed = type(parameter).__module__.startswith("bitsandbytes")  # whose bytes may be held as floats
        if parameter.is_floating_point() and not packed:
            parameter.data = parameter.data.to(torch.float32 if own.search(name) else storage)


def compute_as_planned(model: nn.Module, plan: Plan, *, for_training: bool) -> int:
    """Make 4-bit layers compute in the plan's dtype, and correctly on CPUs; returns their number.

    bitsandbytes silently casts inputs to the dtype in the checkpoint's quantisation config (default fp32), and outputs
    back. On CPUs with AVX512-BF16 it repacks weights in evaluation mode for an operator in bf16 without a backward
    pass: other formats would be rounded, and after the first evaluation, gradients would stop at that layer. It also
    does not support every shape.
    """
    compute = torch_dtype(plan.precision.compute.value)
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    for layer in layers:
        layer.compute_dtype, layer.compute_type_is_set = compute, True
        if (state := vars(layer.weight).get("quant_state")) is not None:
            state.dtype = compute  # of dequantised weights; a checkpoint's own would round them in an fp32 plan
        unfit = layer.in_features % _block_of(layer) or layer.out_features % _CPU_ROWS
        if for_training or unfit or compute is not torch.bfloat16:
            layer.support_avx512bf16_for_cpu = False
    return len(layers)


log = get_logger(__name__)
_CPU_ROWS = 32  # rows per block in bitsandbytes' weight layout for CPUs


def _block_of(layer: Any) -> int:
    """Number of weights that share a scale."""
    state = vars(layer.weight).get("quant_state")
    return 64 if state is None else int(state.blocksize)


def prepare_merge(model: PreTrainedModel, plan: Plan) -> None:
    """Dequantise quantised weights to fp32, to the values used in training."""
    if not getattr(model, "is_quantized", False):
        return
    log.info("merging into dequantised %s weights; the export is not quantised", plan.weights.format.value)
    with no_progress_bars():
        model.dequantize(dtype=torch.float32)
    if plan.weights.experts:
        from halftune.model.load.quantised_experts import dequantise  # imports bitsandbytes

        dequantise(model)
    model.float().requires_grad_(False)  # layers of the checkpoint that are not quantised keep their format otherwise
    conversions: list[Any] = vars(model).get("_weight_conversions") or []
    for one in list(conversions):  # reading 4-bit weights, which saving would try to reverse
        operations = getattr(one, "operations", ())
        if any(type(each).__module__ == "transformers.integrations.bitsandbytes" for each in operations):
            conversions.remove(one)
