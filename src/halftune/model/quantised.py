"""Quantised checkpoints as the plan has them: computed with in its format, or written out in it on load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from halftune.config.quantised import KEPT, WIDENED, method_of
from halftune.core.errors import ModelError
from halftune.core.optional import need
from halftune.model.architectures import read_config
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32, torch_dtype


def quantisation(folder: Path) -> str | None:
    """The format that a checkpoint's config.json names; None for a plain one."""
    file = folder / "config.json"
    return method_of(json.loads(file.read_text(encoding="utf-8")).get("quantization_config"), str(file))


def reading(folder: Path, *, trust_remote_code: bool) -> dict[str, PreTrainedConfig]:
    """What ``from_pretrained`` must be told to read a quantised checkpoint so: ``config``, or nothing.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
        ModelError: a format that is refused when a run is planned.
    """
    method = quantisation(folder)
    if method is None:
        return {}
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if method in KEPT:
        need("bitsandbytes", why=f"a checkpoint in {method}")
    elif method in WIDENED:
        # transformers would widen where its kernels do not run, and elsewhere keep what cannot be trained through.
        config.quantization_config = {**vars(config)["quantization_config"], "dequantize": True}
    else:
        raise ModelError(f"weights quantised by {method} are not known here", where=str(folder))
    return {"config": config}


def store_as_planned(model: PreTrainedModel, plan: Plan) -> None:
    """Brings what was not quantised in a widened checkpoint into the storage dtype.

    transformers leaves it as it is in the files, whatever dtype was asked for. What stays fp32 goes there.
    """
    storage = torch_dtype(plan.precision.storage.value)
    listed = model._get_dtype_plan(storage) if storage is not torch.float32 else {}
    own = re.compile("|".join(entry.replace("*", ".*") for entry in listed) or r"(?!)")
    patterns = plan.precision.keep_fp32.value
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            kept = stays_fp32(name, None, patterns) or own.search(name)
            parameter.data = parameter.data.to(torch.float32 if kept else storage)


def compute_as_planned(model: nn.Module, plan: Plan, *, for_training: bool) -> int:
    """Has 4-bit layers compute in the plan's format, and right on CPUs; returns how many there are.

    bitsandbytes brings what arrives into the format that the checkpoint was quantised with (fp32 where it says none),
    and what leaves back again: nobody would see it. On CPUs with AVX512-BF16 it rearranges the weights of a layer in
    evaluation mode for an operator that has no backward pass: in training, gradients would end at that layer from the
    first evaluation on. And it cannot rearrange every shape.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    for layer in layers:
        layer.compute_dtype, layer.compute_type_is_set = torch_dtype(plan.precision.compute.value), True
        if for_training or layer.in_features % _block_of(layer) or layer.out_features % _CPU_ROWS:
            layer.support_avx512bf16_for_cpu = False
    return len(layers)


_CPU_ROWS = 32  # of a block in bitsandbytes' order of weights for CPUs


def _block_of(layer: Any) -> int:
    """Weights that share a scale."""
    state = vars(layer.weight).get("quant_state")
    return 64 if state is None else int(state.blocksize)


def cannot_merge(model: PreTrainedModel) -> None:
    """Stops a merge into weights that stay quantised: what was learned would be rounded to their few levels.

    Raises:
        ModelError: they are.
    """
    if getattr(model, "is_quantized", False):
        raise ModelError(
            "an adapter cannot be merged into quantised weights",
            where=str(model.config.name_or_path),
            remedy="keep base and adapter apart, as they are in the run folder, or train on the checkpoint in bf16",
        )
