"""Full fine-tuning: trains every parameter of the language model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from halftune.config.sections.model import NoAdapter
from halftune.model.towers import towers_of
from halftune.plan import Plan
from halftune.precision.dtypes import stays_fp32, torch_dtype


def attach(model: PreTrainedModel, adapter: NoAdapter, plan: Plan, seed: int) -> PreTrainedModel:
    """Make all parameters except those of towers trainable, in the plan's trainable dtype.

    Casts parameters one by one: casting the module would also cast rotary tables.
    """
    trainable = torch_dtype(plan.precision.trainable.value)
    towers = towers_of(model)
    for name, parameter in model.named_parameters():
        if towers is not None and towers.own(name):
            continue
        kept = stays_fp32(name, parameter, plan.precision.keep_fp32.value)
        parameter.data = parameter.data.to(torch.float32 if kept else trainable)
        parameter.requires_grad_(True)
    return model
