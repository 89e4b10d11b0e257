"""Full fine-tuning: trains every parameter of the language model, or those that the plan names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from halftune.config.facts.media import part_of
from halftune.config.sections.model import NoAdapter
from halftune.core.errors import ConfigError
from halftune.model.adapters import cast_output
from halftune.model.load.parts import keep_in_graph, release
from halftune.model.load.towers import towers_of
from halftune.plan import Plan
from halftune.precision.dtypes import matches, stays_fp32, torch_dtype


def attach(model: PreTrainedModel, adapter: NoAdapter, plan: Plan, seed: int) -> PreTrainedModel:
    """Make the planned parts trainable, in the plan's trainable dtype; or the parameters of ``train_only``.

    Casts parameters one by one: casting the module would also cast rotary tables.

    Raises:
        ConfigError: a pattern of ``train_only`` matches no parameter.
    """
    trainable, storage = (torch_dtype(one.value) for one in (plan.precision.trainable, plan.precision.storage))
    towers, chosen = towers_of(model), None if plan.train_only is None else _chosen(model, plan.train_only)
    for name, parameter in model.named_parameters():
        tower = towers is not None and towers.own(name)
        if tower and plan.mode(part_of(name)) != "full":
            continue
        train = chosen is None or id(parameter) in chosen
        if train:
            kept = stays_fp32(name, parameter, plan.precision.keep_fp32.value)
            parameter.data = parameter.data.to(torch.float32 if kept else trainable)
        parameter.requires_grad_(train)
    if storage != trainable:
        # cast what trained embeddings return, so that the layers get the storage dtype
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.weight.requires_grad:
                cast_output(module, storage)
    keep_in_graph(model, plan)
    own = dict(model.named_parameters())
    release(model, lambda name: own[name].requires_grad)
    return model


def _chosen(model: PreTrainedModel, patterns: Sequence[str]) -> set[int]:
    """The ids of the parameters that match; a tied parameter has several names.

    Raises:
        ConfigError: a pattern matches none.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name, _ in named):
            remedy = f"the model has names such as {named[-1][0]}"
            what = f"no parameter matches {pattern!r}"
            raise ConfigError(what, where="adapter.train_only", remedy=remedy, code="config.bad_target_modules")
    return {id(parameter) for name, parameter in named if matches(name, patterns)}
