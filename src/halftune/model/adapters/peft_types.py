"""Adapters of peft besides LoRA: OFT, VeRA, IA3, LoHa, LoKr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from halftune.config.sections.model import PeftAdapter
from halftune.core.errors import ConfigError
from halftune.model.adapters import cast_adapter, share_tied
from halftune.model.adapters.all_linear import linear_layers
from halftune.model.adapters.lora import find_modules_to_save, find_targets, task_type
from halftune.model.files.architectures import ignore_peft_warnings
from halftune.model.load.towers import towers_of
from halftune.model.tokenizer.vocabulary import tied_names
from halftune.plan import Plan
from halftune.plan.weights.adapter_types import ADAPTER_TYPES
from halftune.plan.weights.targets import ends_with, saved_around


def attach(model: PreTrainedModel, adapter: Any, plan: Plan, seed: int) -> PeftModel:
    """Attach adapters to the target modules; all other weights are frozen.

    Raises:
        ConfigError: a target or a module to save does not exist in this model, or peft refuses it.
    """
    spec, tied, saved = ADAPTER_TYPES[adapter.type], tied_names(model), find_modules_to_save(model, adapter, plan)
    targets = _names(model, adapter, saved or ())
    options = {theirs: getattr(adapter, ours) for ours, theirs in spec.options.items()} | dict(spec.fixed)
    if adapter.type == "ia3":
        inner = adapter.feedforward_modules
        options["feedforward_modules"] = [one for one in targets if ends_with(one, inner)]
    config = getattr(peft, spec.config)(
        task_type=task_type(plan),
        target_modules=targets,
        modules_to_save=saved,
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
    if tied:
        share_tied(adapted)
    cast_adapter(adapted, plan)
    return adapted


def _names(model: PreTrainedModel, adapter: PeftAdapter, saved: Sequence[str]) -> list[str]:
    """The full names of the linear layers to adapt: not those of towers; by default no routers and not the head."""
    if adapter.target_modules == "all-linear":
        linear, routers, refused = linear_layers(model)
        names = [name for name in linear if name not in {*routers, *refused} and not saved_around(name, saved)]
    else:
        names = find_targets(model, adapter)
    towers = towers_of(model)
    return [name for name in names if towers is None or not towers.own(f"{name}.weight")]
