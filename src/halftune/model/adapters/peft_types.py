"""Adapters of peft besides LoRA: OFT, VeRA, IA3, LoHa, LoKr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from halftune.config.sections.model import PeftAdapter
from halftune.core.errors import ConfigError
from halftune.model.adapters import cast_adapter
from halftune.model.adapters.lora import find_modules_to_save, find_targets, layer_types, task_type
from halftune.model.adapters.targets import linear_layers
from halftune.model.architectures import ignore_peft_warnings
from halftune.model.towers import towers_of
from halftune.plan import Plan
from halftune.plan.adapter_types import ADAPTER_TYPES


def attach(model: PreTrainedModel, adapter: Any, plan: Plan, seed: int) -> PeftModel:
    """Attach adapters to the target modules; all other weights are frozen.

    Raises:
        ConfigError: a target or a module to save does not exist in this model, or peft refuses it.
    """
    spec, targets = ADAPTER_TYPES[adapter.type], _names(model, adapter)
    options = {theirs: getattr(adapter, ours) for ours, theirs in spec.options.items()} | dict(spec.fixed)
    if adapter.type == "ia3":
        inner = adapter.feedforward_modules
        options["feedforward_modules"] = [one for one in targets if f".{one}".endswith(tuple(f".{n}" for n in inner))]
    config = getattr(peft, spec.config)(
        task_type=task_type(plan),
        target_modules=targets,
        modules_to_save=find_modules_to_save(model, adapter, plan),
        **options,
    )
    with torch.random.fork_rng(devices=[]), ignore_peft_warnings():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            what, remedy = f"rejected by peft: {error}", "choose other adapter.target_modules"
            raise ConfigError(what, where="adapter", remedy=remedy, code="config.bad_target_modules") from error
    assert isinstance(adapted, PeftModel)
    cast_adapter(adapted, plan)
    return adapted


def _names(model: PreTrainedModel, adapter: PeftAdapter) -> list[str]:
    """The full names of the linear layers to adapt: not those of towers; by default no routers and not the head."""
    if adapter.target_modules == "all-linear":
        linear, routers, refused = linear_layers(model)
        names = [name for name in linear if name not in {*routers, *refused}]
    else:
        layers = layer_types(adapter)
        every = [name for name, module in model.named_modules() if isinstance(module, layers)]
        names = _asked_for(every, find_targets(model, adapter))
    towers = towers_of(model)
    return [name for name in names if towers is None or not towers.own(f"{name}.weight")]


def _asked_for(every: Sequence[str], asked: str | Sequence[str]) -> list[str]:
    """The layers whose whole name matches a regular expression, or ends with one of some names."""
    if isinstance(asked, str):
        return [name for name in every if re.fullmatch(asked, name)]
    return [name for name in every if f".{name}".endswith(tuple(f".{ending}" for ending in asked))]
