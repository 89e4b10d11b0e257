"""LoRA initialised from the base weights (PiSSA, OLoRA): s·B·A is subtracted from them.

A checkpoint holds the initial A and B, so a resumed run subtracts the same product. The result is converted to plain
LoRA of rank 2r on the unchanged base model: A stacked on the initial A, B beside the negative initial B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from halftune.config.sections.model import LoraAdapter
from halftune.core.errors import ConfigError, ModelError
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype

Initial = dict[str, torch.Tensor]
"""The initial A and B on the CPU, by parameter name."""
_ATTRIBUTE = "initial_adapter"


def initial_of(model: nn.Module) -> Initial:
    """Return the initial A and B of a PiSSA or OLoRA adapter; empty for other adapters."""
    return vars(model).get(_ATTRIBUTE, {})


def initialise(
    adapted: PeftModel, adapter: LoraAdapter, plan: Plan, seed: int, stored: Mapping[str, torch.Tensor] | None
) -> None:
    """Set A and B to a part of each base weight W, and W to W - s·B·A; computed in fp32, rounded to its dtype.

    PiSSA takes the largest singular values (Meng et al. 2024, arXiv:2404.02948), OLoRA a QR decomposition (Büyükakyüz
    2024, arXiv:2406.01775).

    Args:
        adapted: with new adapters, in their final dtype.
        adapter: its ``init``.
        plan: gives the dtype of A and B.
        seed: of the fast SVD; the global random state does not change.
        stored: the initial A and B of the resumed run.

    Raises:
        ConfigError: a target is not a linear layer with floating-point weights.
        ModelError: ``stored`` does not fit the model.
    """
    layers = {name: module for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    dtype, initial = torch_dtype(plan.precision.trainable.value), Initial()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, layer in layers.items():
            base = layer.get_base_layer()
            if type(layer) is not LoraLinear or type(base) is not nn.Linear or not base.weight.is_floating_point():
                what = f"init: {adapter.init} supports linear layers with unquantised weights only, not {name}"
                remedy = "set adapter.init: default, or choose other adapter.target_modules"
                raise ConfigError(what, where="adapter.init", remedy=remedy, code="config.keys_conflict")
            pair = _stored(stored, name, layer) if stored is not None else _decompose(layer, adapter.init)
            a, b = (one.to(dtype).contiguous() for one in pair)
            weight = layer.get_base_layer().weight
            rest = weight.float() - layer.scaling["default"] * (b.float() @ a.float())
            weight.data = rest.to(weight.dtype)
            for key, value in (("lora_A", a), ("lora_B", b)):
                getattr(layer, key)["default"].weight.data = value
                initial[f"{name}.{key}.default.weight"] = value.clone()
    vars(adapted)[_ATTRIBUTE] = initial


def _decompose(layer: Any, init: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] and B [out, r] in fp32, as peft computes them; the base weight stays."""
    base, original = layer.get_base_layer(), layer.get_base_layer().weight.data
    base.weight.data = original.float()
    if init == "olora":
        base.weight.data = base.weight.data.clone()  # peft subtracts in place
        layer.olora_init("default")
    else:
        layer.pissa_init("default", init)
    base.weight.data = original
    return layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data


def _stored(stored: Mapping[str, torch.Tensor], name: str, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for key in ("lora_A", "lora_B"):
        tensor, own = stored.get(f"{name}.{key}.default.weight"), getattr(layer, key)["default"].weight
        if tensor is None or tensor.shape != own.shape:
            what = f"the checkpoint has no initial {key} of {name} with shape {tuple(own.shape)}"
            remedy = "resume with the config of the checkpoint"
            raise ModelError(what, remedy=remedy, code="train.checkpoint_mismatch")
        found.append(tensor)
    return found[0], found[1]


def convert(adapter: Mapping[str, torch.Tensor], initial: Initial, config: Any) -> dict[str, torch.Tensor]:
    """Return the adapter as plain LoRA on the unchanged base: s·(B·A - B0·A0), of twice the rank.

    Args:
        adapter: tensors by the names in an adapter's file.
        initial: the initial A and B.
        config: peft's config; changed in place.
    """
    config.r, config.init_lora_weights = 2 * config.r, True
    # so that the scale, alpha / r or of rsLoRA alpha / √r, stays
    config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    converted = dict(adapter)
    for name, tensor in adapter.items():
        first = initial.get(f"{name.removesuffix('.weight')}.default.weight")
        if first is not None:
            a = ".lora_A." in name
            first = first.to(tensor)
            converted[name] = torch.cat([tensor, first if a else -first], dim=0 if a else 1)
    return converted
